"""Runs of several processes: starting, watching and ending them together."""
