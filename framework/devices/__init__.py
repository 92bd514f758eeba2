"""Devices, and the links between them."""
