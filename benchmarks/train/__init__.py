"""Speed and memory of whole training steps under each policy."""
