"""What a gradient holds beside numbers: the highest that applies, each one bit."""

FINITE, INFINITE, NAN = 0, 1, 2
