"""Every private name of Keras that keras_mp uses, with the reason."""
