"""Loss scaling on JAX."""
