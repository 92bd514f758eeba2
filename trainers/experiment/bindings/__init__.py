"""What gin files bind, held against what the classes take."""
