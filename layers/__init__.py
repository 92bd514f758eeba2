"""Meshwright layers."""
