"""What a compiled program does, for users to read."""
