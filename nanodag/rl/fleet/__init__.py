"""Samplers kept alive, the router before them, weights on their way to them."""
