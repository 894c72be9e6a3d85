"""What a gradient holds beside numbers: the highest bit that applies, or none."""

FINITE, INFINITE, NAN = 0, 1, 2
