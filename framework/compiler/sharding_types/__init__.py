"""Sharding types, inferred and checked before a program is compiled."""
