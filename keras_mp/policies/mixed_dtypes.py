"""Layers that mix dtypes in their `call`: their first call keeps them in float32.

TensorFlow does not promote: it fails if half-precision inputs meet float32 numbers of
the layer's own, such as random draws, a mask or a constant. And some operations, such
as a Fourier transform, take no float16 on any backend.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.interface import HALF
from keras_mp.messages import warn
from keras_mp.policies import symbolic
from keras_mp.policies.choosing import Plan, carry_out, decision_for
from keras_mp.policies.layers import policy_of, state_of, users_code, values_of
from keras_mp.policies.paths import layer_path
from keras_mp.policies.policy import as_stock
from keras_mp.policies.record import Precision, records
from keras_mp.policies.stock_rules import MIXES_DTYPES
from keras_mp.replaced import replaced
from keras_mp.types import Layer

# TensorFlow calls them DT_HALF and DT_BFLOAT16.
_OF_DTYPES = re.compile(
    r"dtype|float16|(\b|_)half\b|types other than float", re.IGNORECASE
)
_REMEDY = "keep it in float32 with"
# Keras adds the arguments of the call, with their dtypes, to every message.
_ADDED_BY_KERAS = "Arguments received by"


# The layers that were kept within the outermost first call of this thread.
_thread = threading.local()


def first_result(layer: Layer, call: Callable[[], Any]) -> Any:
    """What a layer's first call returns.

    If a `ChoosingPolicy` gave half precision to a layer that runs code of the user's,
    and its call fails because of dtypes, it is called again in float32 and stays there.
    If that fails as well, the layer gets its policy back. A model is not called twice:
    its error gets a note with the remedy.
    """
    if not records[id(layer)].runs_users_code:
        with first_call(layer):
            return call()
    with _telling() as kept:
        inside = len(kept)
        is_model = isinstance(layer, keras.Model)
        is_mended = not is_model and may_be_kept(layer)
        tried = {"call": functools.partial(_Tried, layer)} if is_mended else {}
        try:
            with first_call(layer), replaced("own calls", layer, tried):
                return call()
        except _Failed:
            pass
        except engine.dtype_errors as error:
            if engine.only_shapes() or not may_be_kept(layer) or not _may_mix(error):
                raise
            if is_model:
                error.add_note(_note(layer))
                raise
        before = Precision(private.layers_in(layer))
        keep(layer)
        try:
            with first_call(layer):
                result = call()
        except BaseException as error:
            before.put_back()
            if not isinstance(error, Exception):
                raise
            with first_call(layer):
                return call()  # As Keras calls it: the error is Keras' own.
        symbolic.note_float32(layer)
        kept[inside:] = [layer]  # It says more than those inside it.
        return result


class _Failed(BaseException):
    """A layer's `call` has failed for dtypes, and has changed nothing.

    No Exception: Keras tries `call` to build a layer, catches what is one, warns that
    the layer cannot be built, and counts it as built.
    """


class _Tried:
    """The `call` of a layer, which changes nothing where it fails for dtypes."""

    def __init__(self, layer: Layer, call: Callable) -> None:
        self._layer, self._call = layer, call
        self._thread = threading.get_ident()
        functools.update_wrapper(self, call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        # In a step of JAX Keras gives the metrics of layers no values.
        known = [v for v in layer.metrics_variables if private.raw_value(v) is not None]
        state = values_of([*state_of(layer), *known])
        losses = [(x, private.own_losses(x)) for x in private.layers_in(layer)]
        try:
            return self._call(*args, **kwargs)
        except engine.dtype_errors as error:
            if self._thread != threading.get_ident() or engine.only_shapes():
                raise
            for variable, value in state:
                variable.assign(value)
            private.clear_losses(layer)
            for x, own in losses:
                if own:
                    x.add_loss(own)
            if not _may_mix(error):
                raise
            raise _Failed from error


@contextlib.contextmanager
def first_call(layer: Layer) -> Iterator[None]:
    """Gives the layers that `layer` creates in its first call the policy of `layer`."""
    decision = decision_for(layer)
    if decision is None or layer.built:
        yield
        return
    before = keras.config.dtype_policy()
    policy = decision.policy if decision.includes_children else decision.chooser
    if policy is None or policy is before:
        yield
        return
    try:
        private.set_policy_of_thread(as_stock(policy))
        yield
    finally:
        private.set_policy_of_thread(as_stock(before))


@contextlib.contextmanager
def _telling() -> Iterator[list[Any]]:
    """Warns of the layers that are kept in float32 within the outermost such call."""
    outer = getattr(_thread, "kept", None)
    if outer is not None:
        yield outer
        return
    kept: list[Any] = []
    _thread.kept = kept
    try:
        yield kept
    finally:
        _thread.kept = None
        for layer in kept:
            tell(layer)


def keep(layer: Layer) -> None:
    """Turns a layer that mixes dtypes to float32."""
    plan = Plan()
    plan.float32(layer, MIXES_DTYPES)
    carry_out(plan)


def tell(layer: Layer) -> None:
    """Warns that this was done."""
    warn(
        f"{layer_path(layer)} mixes dtypes in half precision, or calls what lacks it, "
        "and computes in float32 from here on. Declare it with "
        f"{_declaration(layer)}, or cast in its {users_code(layer)} where dtypes meet: "
        "`ops.cast(y, x.dtype)`."
    )


def may_be_kept(layer: Layer) -> bool:
    """Does it run code of the user's in half precision, by a `ChoosingPolicy`?"""
    decision = decision_for(layer)
    return (
        decision is not None
        and decision.rule is None
        and policy_of(layer).compute_dtype in HALF
        and bool(users_code(layer))
    )


def _may_mix(error: Exception) -> bool:
    return is_of_dtypes(error) and not is_told(error)


def is_told(error: Exception) -> bool:
    """Has a layer inside named itself in the error?"""
    return any(_REMEDY in note for note in getattr(error, "__notes__", ()))


def is_of_dtypes(error: Exception) -> bool:
    """Does the error say that dtypes do not match, or have no kernel?"""
    return any(
        _OF_DTYPES.search(str(reason).split(_ADDED_BY_KERAS)[0])
        for reason in _reasons(error)
    )


def _reasons(error: BaseException) -> Iterator[BaseException]:
    """The error, and what Keras hides behind it.

    If the function of a Lambda fails in a symbolic call, Keras hides why and asks for
    an `output_shape` instead.
    """
    yield error
    while isinstance(error, NotImplementedError) and error.__context__ is not None:
        error = error.__context__
        if isinstance(error, _Failed) and error.__cause__ is not None:
            error = error.__cause__
        yield error


def _note(layer: Layer) -> str:
    return (
        f"{layer_path(layer)} computes in {policy_of(layer).compute_dtype}. If its "
        f"{users_code(layer)} mixes dtypes, cast there, `ops.cast(y, x.dtype)`, or "
        f"{_REMEDY} {_declaration(layer)}."
    )


def _declaration(layer: Layer) -> str:
    """How to keep the layer in float32; its class may be Keras' own."""
    name = type(layer).__name__
    if users_code(layer) == "`call`":
        return f"`@keras_mp.keep_float32` on the class {name}"
    return f'`dtype="float32"` on the {name}'
