"""The parts of models: layers, weights, random numbers, optimizers."""
