"""Loss scaling on torch."""
