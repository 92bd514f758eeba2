"""Trained models for use elsewhere: SavedModels and bundles."""
