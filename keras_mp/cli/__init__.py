"""What each command of `keras-mp` does once Keras is imported.

`keras_mp_cli` reads the arguments and chooses the backend before that.
"""
