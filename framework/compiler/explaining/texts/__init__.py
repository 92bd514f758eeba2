"""Reports of a program as text."""
