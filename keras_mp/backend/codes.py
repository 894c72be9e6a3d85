"""What a gradient holds beside numbers, as an integer: the highest that applies."""

FINITE, INFINITE, NAN = 0, 1, 2
