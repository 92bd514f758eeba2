"""Windows along split dims, and the halos between their shards."""
