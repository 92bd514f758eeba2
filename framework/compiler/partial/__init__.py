"""Sums that are unreduced along mesh axes: begun, carried through a program, ended."""
