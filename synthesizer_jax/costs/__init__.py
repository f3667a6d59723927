"""What a model costs: parameters, FLOPs, bytes, chips."""
