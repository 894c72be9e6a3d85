"""Loss scaling on TensorFlow."""
