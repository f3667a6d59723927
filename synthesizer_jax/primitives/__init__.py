"""What layers are made of: parameters with logical axes, initializers, products, norms, the mesh."""
