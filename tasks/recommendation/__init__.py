"""Recommendation from implicit feedback."""
