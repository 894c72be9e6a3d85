"""`compare`: the same training under several policies."""
