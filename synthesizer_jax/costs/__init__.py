"""The costs of a model: parameters, FLOPs and bytes, and the chips that provide them."""
