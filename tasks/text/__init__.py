"""Language models and translation."""
