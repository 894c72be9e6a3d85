"""What each layer computes in, and why."""
