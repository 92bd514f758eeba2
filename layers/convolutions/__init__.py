"""Convolutions, and networks of them."""
