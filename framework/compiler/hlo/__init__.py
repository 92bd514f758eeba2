"""Compiled programs: their text, collectives, memory and time."""
