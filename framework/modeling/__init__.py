"""What a model is made of: layers, weights, random numbers, optimizers."""
