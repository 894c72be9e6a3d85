"""Names for annotations: neither Keras nor the backends have types that fit all three.

A type checker takes each for Any, as it does with all of Keras.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import keras

# Of the backend in use, on values or within a trace; or an array of NumPy.
Tensor: TypeAlias = Any
Layer: TypeAlias = keras.layers.Layer
Model: TypeAlias = keras.Model
Optimizer: TypeAlias = keras.optimizers.Optimizer
Variable: TypeAlias = keras.Variable
Variables: TypeAlias = Sequence[keras.Variable]
# None where a variable is not part of the loss.
Gradients: TypeAlias = Sequence[Tensor | None]
