"""What torch runs in a training step: kernels, bytes, waits and memory, counted."""
