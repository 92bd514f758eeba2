"""What runs before TensorFlow is imported, and what binaries say on the terminal."""
