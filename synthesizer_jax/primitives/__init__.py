"""What layers are made of: parameters with logical axes, initializers, norms and the mesh."""
