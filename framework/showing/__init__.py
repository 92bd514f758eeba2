"""Programs and arrays, drawn: a page of a program, shards on their devices."""
