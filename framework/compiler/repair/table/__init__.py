"""The table of operations that XLA's partitioner gets wrong."""
