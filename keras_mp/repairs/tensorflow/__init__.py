"""Repairs on TensorFlow."""
