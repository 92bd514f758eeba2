"""Cases of the matrix: drawn, run and compared."""
