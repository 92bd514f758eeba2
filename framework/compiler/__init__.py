"""What happens to a program: lower, partition, run, report."""
