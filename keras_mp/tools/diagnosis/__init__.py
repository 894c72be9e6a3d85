"""`diagnose`: one batch, and what precision does to it."""
