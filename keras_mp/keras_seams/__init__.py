"""Where keras_mp meets Keras: the methods it wraps, the private names it uses."""
