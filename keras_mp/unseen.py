"""Models that exist already when half precision is asked for: what nobody has seen.

What the seams note at `compile` and at a first call is made up for here, before a
policy of ours changes the model.
"""

from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp import compiling, wanted
from keras_mp.policies import symbolic
from keras_mp.policies.paths import name_layers


def make_up(model: Any) -> None:
    """Looks at a model, or a layer, as the seams would have, if they are in."""
    if wanted.done:
        for layer in private.layers_in(model):
            if isinstance(layer, keras.Model):
                compiling.make_up(layer)
        symbolic.make_up(model)
    name_layers(model)
