"""What a program will take on a mesh: memory, communication and time."""
