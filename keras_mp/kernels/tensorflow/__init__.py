"""Kernels on TensorFlow."""
