"""What is trained: the configuration, and the programs compiled of it."""
