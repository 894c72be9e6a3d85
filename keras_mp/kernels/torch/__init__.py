"""Kernels on torch."""
