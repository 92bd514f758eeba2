"""Layers that other layers are made of."""
