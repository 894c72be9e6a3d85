"""What a call of a layer does beside what Keras does.

the first              all rules choose the layer's policy before it
until one ran on       code of the user's may mix dtypes, and is then made again
values
a head's               half-precision operands, a float32 result
the outermost of a     it takes its inputs as they are and returns float32
model
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.backends.leaves import leaves
from keras_mp.policies import (
    heads,
    hidden,
    inputs,
    integer_casts,
    mixed_dtypes,
    outputs,
    own_calls,
    returned,
)
from keras_mp.policies.choosing import choose_policy
from keras_mp.policies.layers import is_graph, note_call, ran_on_values
from keras_mp.policies.record import Record, record_of, records
from keras_mp.sharding import warn_of_torchs_own
from keras_mp.types import Layer


def wrap_call(original: Callable) -> Callable:
    """Wraps the call of all layers."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            # After a layer's first call this costs a few look-ups and no call, until
            # the user sets another policy.
            record = records.get(id(self))
            policy = self.__dict__.get(private.DTYPE_POLICY)
            if policy is None:  # Its `__init__` did not call Keras': Keras says so.
                return original(self, *args, **kwargs)
            if record is None or record.chosen is not policy or not self.built:
                return _first(self, args, kwargs, original)
            within = returned.watched or own_calls.under_way or hidden.within
            if record.untried or within or isinstance(self, keras.Model):
                return _later(self, record, args, kwargs, original)
            if not record.decision or not record.decision.head:
                return original(self, *args, **kwargs)
            call = functools.partial(original, self, *args, **kwargs)
            return heads.call(self, (args, kwargs), call)
        except Exception as error:
            private.drop_internal_frames(error)
            raise

    return __call__


def _first(
    layer: Layer, args: tuple, kwargs: dict[str, Any], original: Callable
) -> Any:
    alone, is_model = _is_outermost(), isinstance(layer, keras.Model)
    outermost = is_model and alone
    note_call(layer, args, kwargs)
    becomes_part = alone and isinstance(next(leaves(args), None), keras.KerasTensor)
    if alone:
        outputs.note_first_call(layer, becomes_part)
    choose_policy(layer)
    if is_model:
        inputs.keep_input_dtypes(layer)
    if outermost:
        hidden.note_makers(layer)
    record = record_of(layer)
    if record.keeps_input_dtypes:
        args, kwargs = inputs.tensors_in_their_dtypes((args, kwargs))
    watching = returned.watching(layer) if outermost else contextlib.nullcontext()
    with _in_a_call(), watching:
        result = _run(layer, record, args, kwargs, original, outermost)
    _note_result(layer, record, args, kwargs, original, result)
    if alone:  # Its call may have created layers.
        outputs.note_first_call(layer, becomes_part)
    record.chosen = layer.dtype_policy
    if not outermost:
        return result
    hidden.note_makers(layer)
    if engine.shards:
        warn_of_torchs_own(layer)
    if layer.compiled and not is_graph(layer):
        outputs.note_compiled(layer)
    return outputs.in_float32(layer, result)


def _later(
    layer: Layer,
    record: Record,
    args: tuple,
    kwargs: dict[str, Any],
    original: Callable,
) -> Any:
    outermost = isinstance(layer, keras.Model) and _is_outermost()
    if record.keeps_input_dtypes:
        args, kwargs = inputs.tensors_in_their_dtypes((args, kwargs))
    within = returned.watched or own_calls.under_way or hidden.within
    untried, makers = record.untried, record.makers if outermost else None
    if untried or record.mixes or makers or within:
        result = _run(layer, record, args, kwargs, original, outermost)
    else:
        result = original(layer, *args, **kwargs)
    if untried:
        _note_result(layer, record, args, kwargs, original, result)
    return outputs.in_float32(layer, result) if outermost else result


def _run(
    layer: Layer,
    record: Record,
    args: tuple,
    kwargs: dict[str, Any],
    original: Callable,
    outermost: bool,
) -> Any:
    """Calls a layer as its record says, and as the calls around it want it."""
    call = functools.partial(original, layer, *args, **kwargs)
    if record.decision and record.decision.head:
        call = functools.partial(heads.call, layer, (args, kwargs), call)
    if record.untried:
        call = functools.partial(mixed_dtypes.first_result, layer, call)
    nothing, makers = contextlib.nullcontext(), record.makers if outermost else None
    tried_again = record.untried and isinstance(layer, keras.Model) or record.mixes
    enters = record.mixes or own_calls.under_way
    with (
        hidden.passed_on(makers) if makers else nothing,
        own_calls.entered(layer) if enters else nothing as to_own_call,
        own_calls.mended(layer) if tried_again else nothing,
    ):
        result = call()
        if (returned.watched or hidden.within) and hidden.makes_output(layer):
            result = hidden.through_float32(result)
        if to_own_call:
            result = own_calls.handed(result)
        if returned.watched:
            returned.note(layer, result, outermost)
    return result


def _note_result(
    layer: Layer,
    record: Record,
    args: tuple,
    kwargs: dict[str, Any],
    original: Callable,
    result: Any,
) -> None:
    record.untried = record.runs_users_code and not ran_on_values(result)
    is_model = isinstance(layer, keras.Model)
    if record.runs_users_code and not (record.untried or is_model):
        again = functools.partial(original, layer, *args, **kwargs)
        integer_casts.look(layer, (args, kwargs), again)


def wrap_stateless_call(original: Callable) -> Callable:
    """Wraps the stateless call."""

    def stateless_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = isinstance(self, keras.Model) and _is_outermost()
        with _in_a_call(), own_calls.entered(self), own_calls.mended(self):
            result, *state = original(self, *args, **kwargs)
        return (outputs.in_float32(self, result) if outermost else result), *state

    return stateless_call


def wrap_output_spec(original: Callable) -> Callable:
    """Wraps how a layer says what it returns."""

    def compute_output_spec(self: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = isinstance(self, keras.Model) and _is_outermost()
        with _in_a_call():
            specs = original(self, *args, **kwargs)
        return outputs.specs_in_float32(self, specs) if outermost else specs

    return compute_output_spec


# Which calls this thread is in.
_thread = threading.local()


@contextlib.contextmanager
def _in_a_call() -> Iterator[None]:
    """Marks a call that Keras has no context for: while it builds, and stateless."""
    before = getattr(_thread, "in_a_call", False)
    try:
        _thread.in_a_call = True
        yield
    finally:
        _thread.in_a_call = before


def _is_outermost() -> bool:
    """Is no other call of a layer under way in this thread?"""
    in_a_call = getattr(_thread, "in_a_call", False)
    return not in_a_call and private.call_under_way() is None
