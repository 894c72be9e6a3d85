"""`keras-mp doctor`."""

from keras_mp.diagnostics.doctor import examine


def doctor() -> None:
    """Prints what hardware is here, what is fast on it, and what "auto" picks."""
    print(examine())
