"""Meshwright trainers."""
