"""Models that mix dtypes in their own `call`, which then gets float32 from its layers.

A model's inputs are float32 until the first layer, and what its layers return is half
precision: in `x + self.net(x)` the two meet. JAX and torch promote, TensorFlow fails,
and so does a loop that carries one and gets back the other. A model whose call fails
for that is called again: it computes in float32 itself, while its layers stay in half
precision, and so it goes on.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.interface import HALF
from keras_mp.backends.leaves import is_half_tensor, mapped
from keras_mp.messages import warn
from keras_mp.policies import inputs
from keras_mp.policies.choosing import Plan, carry_out, decision_for
from keras_mp.policies.layers import is_graph, policy_of, state_of, values_of
from keras_mp.policies.mixed_dtypes import is_of_dtypes, is_told
from keras_mp.policies.paths import layer_path
from keras_mp.policies.record import Precision, record_of, records
from keras_mp.replaced import replaced
from keras_mp.types import Layer, Model

# The threads whose innermost call is that of such a model itself, not of a layer in it.
under_way: set[int] = set()


def mixes(layer: Layer) -> bool:
    """Is it a model that has been found to mix dtypes in its `call`?"""
    record = records.get(id(layer))
    return record is not None and record.mixes


def may_be_kept(model: Model) -> bool:
    """Does a model compute in half precision itself because of us?"""
    return not is_graph(model) and not mixes(model) and _is_half(model)


def keep(model: Model) -> None:
    """Turns what a model computes itself to float32."""
    record_of(model).mixes = True
    plan = Plan()
    plan.own_call_in_float32(model)
    carry_out(plan)
    inputs.keep_input_dtypes(model)


def tell(model: Model) -> None:
    """Warns that this was done."""
    warn(
        f"The `call` of {layer_path(model)} mixes dtypes: what it computes itself "
        "is float32 from here on, and its layers stay in half precision. To have "
        "half precision there, too, cast: `ops.cast(x, y.dtype)`."
    )


@contextlib.contextmanager
def entered(layer: Layer) -> Iterator[bool]:
    """Marks the call of a layer; yields whether such a model gets what it returns."""
    thread = threading.get_ident()
    outer, own = thread in under_way, mixes(layer)
    # Its own weights may be bfloat16, or Keras may have begun a half-precision call.
    scope = private.AutocastScope("float32") if own else contextlib.nullcontext()
    try:
        _mark(thread, own)
        with scope:
            yield outer
    finally:
        _mark(thread, outer)


def _mark(thread: int, within: bool) -> None:
    (under_way.add if within else under_way.discard)(thread)


def handed(result: Any) -> Any:
    """What a layer returns to such a model: half-precision tensors in float32."""
    return mapped(lambda x: private.cast_output(x) if is_half_tensor(x) else x, result)


@contextlib.contextmanager
def mended(layer: Layer) -> Iterator[None]:
    """Lets the `call` of a model be made again if it mixes dtypes.

    It is `call` that is made again, for Keras also makes it alone: to build the model,
    and where it is computed again for its gradient.
    """
    # Another thread may be in the model's first call.
    mending = isinstance(vars(layer).get("call"), _Mended)
    is_plain = not isinstance(layer, keras.Model) or is_graph(layer)
    if is_plain or mending:
        yield
        return
    with replaced("own calls", layer, {"call": functools.partial(_Mended, layer)}):
        yield


class _Mended:
    """The `call` of a model, made again if it mixes dtypes."""

    def __init__(self, model: Model, call: Callable) -> None:
        self._model, self._call = model, call
        functools.update_wrapper(self, call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        if mixes(model):
            return self._again(*args, **kwargs)
        state = values_of(state_of(model))
        try:
            return self._call(*args, **kwargs)
        except engine.dtype_errors as error:
            of_dtypes = is_of_dtypes(error) and not is_told(error)
            if engine.only_shapes() or not of_dtypes or not _is_half(model):
                raise
            before = Precision([model])
            keep(model)
            private.clear_losses(model)
            for variable, value in state:
                variable.assign(value)
            try:
                result = self._again(*args, **kwargs)
            except BaseException as second:
                before.put_back()
                raise (error if isinstance(second, Exception) else second) from None
        tell(model)
        return result

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        with entered(self._model):
            return self._call(*args, **kwargs)


def _is_half(model: Model) -> bool:
    """Do float32 inputs meet half precision in it because of us?"""
    return inputs.keeps_input_dtypes(model) or any(
        decision_for(layer) is not None and policy_of(layer).compute_dtype in HALF
        for layer in private.layers_in(model)
    )
