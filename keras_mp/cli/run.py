"""`keras-mp run`, from the moment when the script has imported Keras."""

import keras_mp
from keras_mp.loss_scaling import summary as optimizers


def start(policy: str) -> None:
    """Sets the policy, and keeps the counters of every optimizer from here on."""
    optimizers.start()
    keras_mp.set_global_policy(policy)


def summary() -> list[str]:
    """One line for each optimizer that the script compiled a model with."""
    return optimizers.lines()
