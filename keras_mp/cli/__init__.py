"""The commands of `keras-mp` that need Keras."""
