"""Kernels on JAX."""
