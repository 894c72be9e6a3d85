"""`keras-mp doctor`."""

from keras_mp.tools.doctor import examine


def doctor() -> None:
    """Prints what hardware is here, what is fast on it, and what "auto" picks."""
    print(examine())
