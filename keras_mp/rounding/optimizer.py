"""The optimizer wrapper that rounds stochastically."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

import keras_mp.keras_private as private
from keras_mp import wanted
from keras_mp.backends import engine
from keras_mp.backends.interface import BFLOAT16
from keras_mp.policies import heads
from keras_mp.replaced import replaced
from keras_mp.rounding.holders import hold
from keras_mp.rounding.scope import RoundingScope
from keras_mp.types import Gradients, Optimizer, Tensor, Variables

_SLOT_DTYPES = (None, BFLOAT16)


@keras.saving.register_keras_serializable(package="keras_mp")
class StochasticRoundingOptimizer(keras.optimizers.Optimizer):
    """Trains bfloat16 weights as well as float32 ones, in half the memory.

    bfloat16 cannot hold Adam's own numbers (it rounds 0.999 to 1), and updates below
    half of a weight's last bit are lost. Here the inner optimizer computes in float32,
    and each weight and slot that it writes is rounded at random to one of its two
    neighbours in bfloat16, which keeps the mean. No float32 copy is kept.

    ```python
    keras.config.set_dtype_policy("bfloat16")
    model = ...
    model.compile(keras_mp.StochasticRoundingOptimizer("adam"), "mse")
    ```

    Args:
        inner_optimizer: a Keras optimizer, its name ("adam") or its config.
        slot_dtype: "bfloat16" keeps the slots of float32 weights in bfloat16 too, each
            half as large as the weights; None keeps them in the dtype of their weight.
        seed: integer from 0 to 2**31 - 1 for the random bits. If left out, one is drawn
            that depends on `keras.utils.set_random_seed`.
        name: name of the optimizer.

    Raises:
        ValueError: for an argument outside its range, and if `tf.distribute` has
            several replicas.

    Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision".
    """

    def __init__(
        self,
        inner_optimizer: str | keras.optimizers.Optimizer,
        slot_dtype: str | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        inner = _checked_inner(inner_optimizer)
        if slot_dtype not in _SLOT_DTYPES:
            raise ValueError(
                '`slot_dtype` must be None or "bfloat16". Received: '
                f"slot_dtype={slot_dtype!r}."
            )
        if seed is None:
            seed = random.randrange(2**31)  # Keras draws its seeds like this.
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
            raise ValueError(
                "`seed` must be a whole number from 0 to 2**31 - 1. Received: "
                f"seed={seed!r}."
            )
        wanted.half_precision()
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner
        self.slot_dtype = slot_dtype
        private.share_steps(self, inner)
        hold(self, inner)
        with keras.name_scope(self.name):
            self._seed = keras.Variable(
                seed,
                dtype="int32",
                trainable=False,
                autocast=False,
                aggregation="only_first_replica",
                name="seed",
            )

    def build(self, variables: Variables) -> None:
        """Creates the inner optimizer's variables; does nothing the second time."""
        if self.built:
            return
        variables = list(variables)
        inner = self.inner_optimizer
        if inner.built:
            private.check_known(inner, variables)
        else:
            with _slots_in(self.slot_dtype, variables):
                inner.build(variables)
        super().build(variables)
        self._seed.assign(engine.agreed(self._seed.value))

    @property
    def variables(self) -> list[Any]:
        """The seed, and the variables of the inner optimizer."""
        return [self._seed, *self.inner_optimizer.variables]

    def apply(
        self, grads: Gradients, trainable_variables: Sequence[Any] | None = None
    ) -> None:
        """Updates the variables.

        Args:
            grads: gradients, one for each variable, None where there is none.
            trainable_variables: the variables; by default those that the optimizer was
                built with.
        """
        grads = list(grads)
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "`trainable_variables` must be given to an optimizer that is not "
                    "built. Received: trainable_variables=None."
                )
            with keras.name_scope(self.name):
                self.build(trainable_variables)
        if trainable_variables is None:
            trainable_variables = private.own_trainable(self)
        engine.refuse_replicas("StochasticRoundingOptimizer")
        inner, variables = self.inner_optimizer, list(trainable_variables)
        step = private.applied_steps(inner).value
        rounded = engine.stochastic_rounding(self._seed.value, step)
        if engine.is_tracing() or _reads_all(inner):
            # Casting them all at once would take four bytes per weight.
            grads = [None if g is None else _in_float32(g) for g in grads]
        written = [*variables, *inner.variables]
        with engine.plain_updates(parts_of(inner)), RoundingScope(written, rounded):
            inner.apply(grads, variables)

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Tensor) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """The iterations of the inner optimizer."""
        return self.inner_optimizer.iterations

    @property
    def loss_scale_factor(self) -> float | None:
        """The factor of the inner optimizer, which divides by it."""
        return self.inner_optimizer.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        if hasattr(self, "inner_optimizer"):  # Not while Keras makes its own.
            self.inner_optimizer.loss_scale_factor = factor

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of an inner `MultiOptimizer`; else an AttributeError."""
        return self.inner_optimizer.optimizers

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Ends a `fit` as the inner optimizer does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """The arguments; the seed itself is among the variables."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            "slot_dtype": self.slot_dtype,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict | None = None
    ) -> "StochasticRoundingOptimizer":
        """Creates the wrapper and its inner optimizer from `get_config`'s dict."""
        inner = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return heads.from_file(
            {**config, "inner_optimizer": inner}, lambda config: cls(**config)
        )

    def __dir__(self) -> list[str]:
        # Keras' saving goes on to what dir() names, and would write a second copy.
        return [name for name in super().__dir__() if name != "inner_optimizer"]


def parts_of(optimizer: Optimizer) -> list[Any]:
    """What updates the variables: the optimizer without this wrapper, and its parts.

    A `MultiOptimizer` has parts.
    """
    is_wrapper = isinstance(optimizer, StochasticRoundingOptimizer)
    inner = optimizer.inner_optimizer if is_wrapper else optimizer
    return [inner, *getattr(inner, "optimizers", ())]


def _reads_all(inner: Optimizer) -> bool:
    """Does Keras compute with all gradients before the first update?"""
    return any(
        part.clipnorm
        or part.clipvalue
        or part.global_clipnorm
        or part.gradient_accumulation_steps
        for part in parts_of(inner)
    )


def _in_float32(grad: Tensor) -> Any:
    return ops.cast(ops.convert_to_tensor(grad, sparse=False), "float32")


@contextlib.contextmanager
def _slots_in(slot_dtype: str | None, variables: Variables) -> Iterator[None]:
    """Gives slots, and no other numbers, their weight's dtype or `slot_dtype`.

    Keras also creates scalars in the dtype of a weight: products over all steps, which
    bfloat16 cannot hold.
    """
    half = {id(v) for v in variables if v.dtype == BFLOAT16}
    thread = threading.get_ident()

    def in_its_dtype(original: Callable) -> Callable:
        def add_variable_from_reference(
            self: Any, reference_variable: Any, *args: Any, **kwargs: Any
        ) -> Any:
            is_half = slot_dtype or id(reference_variable) in half
            if not is_half or threading.get_ident() != thread:
                return original(self, reference_variable, *args, **kwargs)
            with private.as_dtype([reference_variable], BFLOAT16):
                return original(self, reference_variable, *args, **kwargs)

        return add_variable_from_reference

    # On the class: a `MultiOptimizer` may create its optimizers while it is built.
    adding = {"add_variable_from_reference": in_its_dtype}
    with (
        replaced("slots", keras.optimizers.Optimizer, adding),
        private.as_dtype([v for v in variables if id(v) in half], "float32"),
    ):
        yield


def _checked_inner(inner_optimizer: Optimizer) -> Any:
    inner = keras.optimizers.get(inner_optimizer)
    if not isinstance(inner, keras.optimizers.Optimizer) or isinstance(
        inner, StochasticRoundingOptimizer | keras.optimizers.LossScaleOptimizer
    ):
        raise ValueError(
            "`inner_optimizer` must be a Keras optimizer, its name or its config, and "
            "no wrapper round one. A LossScaleOptimizer goes outside of this one. "
            f"Received: inner_optimizer={inner_optimizer!r}."
        )
    return inner
