"""Manual regions, as either partitioner reads them."""
