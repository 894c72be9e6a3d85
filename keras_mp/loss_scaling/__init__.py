"""Loss scaling: its rule, its state, and the optimizer that applies it."""
