"""XLA by way of JAX: from a module to an executable, and the devices that run it."""
