"""The code before TensorFlow is imported, and the binaries' terminal messages."""
