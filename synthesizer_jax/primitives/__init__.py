"""Building blocks of layers: parameters with logical axes, initializers, norms and the mesh."""
