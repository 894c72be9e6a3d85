"""A training step with loss scaling over the same step without."""
