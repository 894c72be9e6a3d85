"""Updates of bfloat16 variables: float32 arithmetic, stochastic rounding."""
