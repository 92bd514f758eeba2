"""The table of what XLA's partitioner gets wrong."""
