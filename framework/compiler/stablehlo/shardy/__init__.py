"""What Shardy says of a module: the rules of its ops, and completed shardings."""
