"""A program's arguments and results, between host and devices."""
