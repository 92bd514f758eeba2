"""Reading examples, for all tasks."""
