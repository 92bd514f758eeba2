"""Where the variables of functions and models are kept on a mesh."""
