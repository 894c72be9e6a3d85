"""The checks that each model of the sweep goes through, up to the first that fails."""

import contextlib
import gc
import os
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

import keras_mp
from keras_mp.keras_private import layers_in
from sweeps.model_cases import Case, inputs, training

# At the first scale, 2**15, the gradients of some models overflow. Each skipped step
# halves the scale; after 15 of them it is 1.
STEPS = 16


class Failure(Exception):
    """A check that a model did not pass."""


class Result(NamedTuple):
    """The outcome ("ok", or the first failed check) and how many steps it skipped."""

    outcome: str
    skipped: int


class Run:
    """One model, made mixed in one way, through all checks.

    Args:
        case: the model.
        policy: the name of a policy.
        how: "global", "dtype" or "convert"; in plain Keras "keras", by the global
            policy, or "keras dtype".
        skipped: how many steps the model is known to skip: they are left out.
    """

    def __init__(self, case: Case, policy: str, how: str, skipped: int = 0) -> None:
        self.case, self.policy, self.how = case, policy, how
        self.skipped = skipped
        self.plain = how.startswith("keras")

    def result(self) -> Result:
        """Runs the checks, up to the first that fails."""
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy("float32")
        if self.plain:
            keras_mp.uninstall()
        try:
            self._all_checks()
            return Result("ok", self.skipped)
        except Failure as failure:
            return Result(str(failure), self.skipped)
        finally:
            keras.config.set_dtype_policy("float32")
            keras_mp.install()
            gc.collect()

    def _all_checks(self) -> None:
        with _check("build"):
            model = self._mixed()
        with _check("compile"):
            _take_statistics_from_the_batch(model)
            x = inputs(model, self.case.batch)
            loss, targets = training(model, x, self.case.loss)
            model.compile(
                # Untrained models of a hundred layers have gradients in the thousands.
                optimizer=keras.optimizers.SGD(1e-3, clipnorm=1.0),
                jit_compile=keras.backend.backend() == "jax",
                run_eagerly=self._eagerly(),
                **loss,
            )
        with _check("computes in half precision"):
            self._computes_in_half(model)
        with _check("symbolic outputs in float32"):
            self._are_float32(model.outputs)
        with _check("train"):
            self._train(model, x, targets)
        with _check("predict"):
            before = _predictions(model, x)
            if not all(np.isfinite(p).all() for p in before):
                raise ValueError("predictions are not finite")
        with _check("predictions in float32"):
            self._are_float32(before)
        keras.config.set_dtype_policy("float32")
        with _file() as path:
            with _check("save"):
                model.save(path)
            del model
            gc.collect()
            with _check("open"):
                opened = keras.saving.load_model(path)
        with _check("predict when opened"):
            after = _predictions(opened, x)
        with _check("same predictions when opened"):
            _same(before, after)

    def _mixed(self) -> Any:
        policy = (keras.DTypePolicy if self.plain else keras_mp.Policy)(self.policy)
        if self.how in ("global", "keras"):
            keras.config.set_dtype_policy(policy)
            return self.case.build(None)
        if self.how in ("dtype", "keras dtype"):
            return self.case.build(policy)
        model = self.case.build(None)
        x = inputs(model, self.case.batch)
        with _check("predict in float32"):
            before = _predictions(model, x)
        with _check("convert"):
            keras_mp.convert(model, self.policy)
        with _check("predict when converted"):
            _predictions(model, x)
        with _check("convert to float32"):
            keras_mp.convert(model, "float32")
            after = _predictions(model, x)
        with _check("the same predictions when converted to and fro"):
            _same(before, after)
        with _check("convert again"):
            keras_mp.convert(model, self.policy)
        return model

    def _eagerly(self) -> bool:
        # TensorFlow takes most of the time to trace the graph of a large model: one of
        # the three ways does so, and plain Keras in the same way.
        ways = ("global", "keras")
        return keras.backend.backend() == "tensorflow" and self.how not in ways

    def _computes_in_half(self, model: Any) -> None:
        dtype = self.policy.removeprefix("mixed_")
        half = [x for x in layers_in(model) if x.compute_dtype == dtype]
        # The shell of a Functional model computes nothing.
        if not any(layer.weights and not _is_model(layer) for layer in half):
            raise ValueError(f"no layer with weights computes in {dtype}")
        if self.plain:
            return
        scaled = isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
        if scaled != (dtype == "float16"):
            raise ValueError(f"the loss is {'' if scaled else 'not '}scaled")

    def _are_float32(self, tensors: Any) -> None:
        # Integers are ids or counts. Plain Keras' outputs are in half precision.
        floats = (t for t in tensors if keras.backend.is_float_dtype(str(t.dtype)))
        wrong = sorted({str(t.dtype) for t in floats} - {"float32"})
        if wrong and not self.plain:
            raise ValueError(f"an output is {', '.join(wrong)}")

    def _train(self, model: Any, x: Any, y: Any) -> None:
        before = _prints(model.trainable_variables)
        if self.skipped:
            scale = model.optimizer.dynamic_scale
            scale.assign(scale * 0.5**self.skipped)
        for _ in range(STEPS - self.skipped):
            # Not `model.fit`: KerasHub's SAM overrides it to say that it cannot train.
            history = keras.Model.fit(
                model, x, y, batch_size=self.case.batch, verbose=0
            )
            optimizer = model.optimizer
            optimizer = getattr(optimizer, "inner_optimizer", optimizer)
            if int(optimizer.iterations):
                break
            self.skipped += 1
        else:
            raise ValueError(f"all of {STEPS} steps were skipped")
        loss = history.history["loss"][-1]
        if not np.isfinite(loss):
            raise ValueError(f"the loss is {loss}")
        for variable in model.variables:
            value = keras.ops.convert_to_numpy(variable)
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise ValueError(f"{variable.path} is not finite")
        if _prints(model.trainable_variables) == before:
            raise ValueError("no weight changed")


@contextlib.contextmanager
def _check(name: str) -> Iterator[None]:
    try:
        yield
    except Failure:
        raise
    except Exception as error:  # The sweep looks for errors of every kind.
        message = " ".join(str(error).split())
        raise Failure(f"{name}: {type(error).__name__}: {message}") from error


@contextlib.contextmanager
def _file() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "model.keras")


def _predictions(model: Any, x: Any) -> list[np.ndarray]:
    if keras.backend.backend() == "tensorflow":
        model.run_eagerly = True
    predictions = model.predict(x, verbose=0)
    return [np.asarray(p) for p in keras.tree.flatten(predictions)]


def _same(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    for a, b in zip(before, after, strict=True):
        if a.dtype != b.dtype:
            raise ValueError(f"{a.dtype} became {b.dtype}")
        if a.tobytes() != b.tobytes():
            apart = np.abs(a.astype("float64") - b.astype("float64")).max()
            raise ValueError(f"they differ by up to {apart:.2g}")


def _prints(variables: Any) -> list[int]:
    """Checksums of variables: copies of the largest models would take gigabytes."""
    arrays = (keras.ops.convert_to_numpy(v) for v in variables)
    return [zlib.crc32(np.ascontiguousarray(a).data) for a in arrays]


def _take_statistics_from_the_batch(model: Any) -> None:
    """Sets a momentum of 0, so that one step trains the statistics.

    With untrained ones deep residual networks overflow at inference, even in float32.
    """
    for layer in layers_in(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0


def _is_model(layer: Any) -> bool:
    return isinstance(layer, keras.Model)
