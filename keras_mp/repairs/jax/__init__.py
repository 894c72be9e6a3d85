"""Repairs on JAX."""
