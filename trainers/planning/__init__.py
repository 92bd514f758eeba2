"""Planning: the memory, communication and time of a program on a mesh."""
