"""TF functions with variables, run on a mesh."""
