"""Sums that are pending along mesh axes: begun, carried through a program, ended."""
