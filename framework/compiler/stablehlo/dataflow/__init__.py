"""What follows of the values of a program, through loops or of constants."""
