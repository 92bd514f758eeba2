"""The operators of the matrix."""
