"""The user's interface to sharding: meshes, shardings, annotations, plans."""
