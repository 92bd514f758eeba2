"""Programs laid out so that XLA partitions them right."""
