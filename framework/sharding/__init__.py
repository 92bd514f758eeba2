"""What a user writes: meshes, shardings, annotations, plans."""
