"""Segmentation of volumes."""
