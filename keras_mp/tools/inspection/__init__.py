"""`inspect`: what every layer of a model computes in, and why."""
