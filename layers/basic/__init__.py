"""Layers of which others are made."""
