"""Repairs on torch."""
