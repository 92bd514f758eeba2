"""Meshwright tasks."""
