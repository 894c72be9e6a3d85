"""Steps on several devices and processes of JAX, printed as JSON; see `processes`.

python engine_jax.py loop|fit data|model...
"""

import inspect
import json
import os
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
from backends import values
from jax.experimental import multihost_utils
from step_sequences import SEQUENCES, WEIGHTS, trace_line
from test_skipped_steps import X, Y, model_under

import keras_mp

PROCESSES, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


def distribution(kind):
    """All devices along the batch; or two along the weights, the others so."""
    if kind == "data":
        return keras.distribution.DataParallel(auto_shard_dataset=False)
    shape = (jax.device_count() // 2, 2)
    layout_map = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh(shape, ["batch", "model"])
    )
    layout_map["matrix"] = ("model", None)
    layout_map["(.*/)?dense/kernel"] = (None, "model")
    layout_map["(.*/)?dense/bias"] = ("model",)
    return keras.distribution.ModelParallel(
        layout_map=layout_map, auto_shard_dataset=False
    )


def whole(variable):
    """What a variable holds on all devices, on whichever process they are."""
    array = variable.value
    if array.is_fully_replicated or array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def sharded(variables):
    """Names of the variables that are not the same on every device."""
    return [v.name for v in variables if not v.value.sharding.is_fully_replicated]


# A stateless loop ------------------------------------------------------------------


class Loop:
    """A jitted stateless loop, which one configuration's sequences share."""

    def __init__(self, scaling, inner):
        self.optimizer = optimizer = keras_mp.LossScaleOptimizer(
            keras.optimizers.SGD(**inner), max_consecutive_skips=6, **scaling
        )
        self.weights = [
            keras.Variable(w, name=name)
            for w, name in zip(WEIGHTS, ["matrix", "scalar"], strict=True)
        ]
        optimizer.build(self.weights)
        self.variables = [*self.weights, *optimizer.variables]
        self.start = [v.value for v in self.variables]

        def scaled_loss(trainable, state, batch):
            # Its gradient is the sum of what the replicas have.
            loss = sum(jnp.sum(g * w) for g, w in zip(batch, trainable, strict=True))
            return optimizer.stateless_scale_loss(state, loss)

        @jax.jit
        def step(trainable, state, batch, losses):
            grads = jax.grad(scaled_loss)(trainable, state, batch)
            return optimizer.stateless_apply(
                state, grads, trainable, loss=jnp.mean(losses)
            )

        self.step = step

    def trace(self, sequence):
        """The lines of the trace, and the steps at which it was said to diverge."""
        replicas = 4
        trainable, state = self.start[:2], self.start[2:]
        lines, diverged = [], []
        for index in range(len(sequence.steps)):
            grads = [sequence.gradients(index, r, replicas) for r in range(replicas)]
            losses = [sequence.loss(index, r, replicas) for r in range(replicas)]
            batch = [along_the_batch(parts) for parts in zip(*grads, strict=True)]
            trainable, state = self.step(
                trainable, state, batch, along_the_batch(losses)
            )
            self.keep([*trainable, *state])
            lines.append(
                trace_line(
                    values(self.optimizer._loss_scaling.variables),
                    whole(self.optimizer.inner_optimizer._iterations)
                    // (sequence.inner.get("gradient_accumulation_steps", 1)),
                    [whole(v) for v in self.weights],
                )
            )
            try:
                self.optimizer.raise_if_diverged(state)
            except keras_mp.TrainingDivergedError:
                diverged.append(index)
        return lines, diverged

    def keep(self, arrays):
        for variable, array in zip(self.variables, arrays, strict=True):
            before = variable.value.sharding
            assert array.sharding.is_equivalent_to(before, array.ndim), variable.name
            variable.assign(array)


def along_the_batch(parts):
    """One global array of what every replica has."""
    parts = np.stack(parts)
    mesh = keras.distribution.distribution().device_mesh.backend_mesh
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    return jax.make_array_from_callback(parts.shape, sharding, parts.__getitem__)


def loop():
    loops, results = {}, {}
    for name, sequence in SEQUENCES.items():
        configuration = str(sequence.options()) + str(sequence.inner_options())
        if configuration not in loops:
            loops[configuration] = Loop(sequence.options(), sequence.inner_options())
        results[name] = loops[configuration].trace(sequence)
    return {
        "traces": {name: trace for name, (trace, _) in results.items()},
        "diverged": {name: steps for name, (_, steps) in results.items() if steps},
        "compilations": max(each.step._cache_size() for each in loops.values()),
        "sharded": sharded(next(iter(loops.values())).variables),
    }


# fit -------------------------------------------------------------------------------


def batches(poisoned_row):
    """This process' part of six batches, and of one poisoned before two of them."""
    parts = min(PROCESSES, keras.distribution.distribution().num_model_replicas)
    for index in range(6):
        rows = slice(8 * index, 8 * index + 8)
        x, y = X[rows], Y[rows]
        if poisoned_row is not None and index in (0, 3):
            bad_x, bad_y = x.copy(), y.copy()
            if index == 0:  # Gradients overflow, the loss is finite.
                bad_y[poisoned_row] = 1e6
            else:
                bad_x[poisoned_row] = np.inf
            yield tuple(np.array_split(a, parts)[RANK % parts] for a in (bad_x, bad_y))
        yield tuple(np.array_split(a, parts)[RANK % parts] for a in (x, y))


def fit():
    """Trainings without a poisoned sample, with one on the first and the last device.

    The first starts at the scale that the others come to after their first step. All
    go through one compiled step, each from the same values.
    """
    distribution = keras.distribution.distribution()
    keras.backend.clear_session(free_memory=False)  # For layers of the same names.
    keras.distribution.set_distribution(distribution)  # Which it cleared, too.
    model = model_under()
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    variables = [*model.variables, *optimizer.variables]
    start = [whole(v) for v in variables]

    def fitted(poisoned_row, initial_scale):
        for variable, array in zip(variables, start, strict=True):
            variable.assign(array)
        optimizer.dynamic_scale.assign(initial_scale)
        steps = 6 if poisoned_row is None else 8
        history = model.fit(
            batches(poisoned_row), steps_per_epoch=steps, verbose=0, shuffle=False
        )
        step = inspect.getclosurevars(model.train_function.__wrapped__).nonlocals[
            "step_function"
        ]
        kept = model.variables + optimizer.inner_optimizer.variables
        return {
            "values": {v.path: whole(v).tobytes().hex() for v in kept},
            "history": history.history,
            "scale": float(optimizer.loss_scale),
            "skipped": int(optimizer.skipped_steps),
            "consecutive": int(optimizer.consecutive_skips),
            "last finite": bool(optimizer.last_step_finite),
            "nonfinite": len(optimizer.nonfinite_report()),
            "compilations": step._cache_size(),
            "sharded": sharded(variables),
        }

    return {
        "clean": fitted(None, 128.0),
        "first": fitted(0, 256.0),
        "last": fitted(7, 256.0),
    }


if __name__ == "__main__":
    if PROCESSES > 1:
        address = f"127.0.0.1:{os.environ['PORTS'].split()[0]}"
        keras.distribution.initialize(address, PROCESSES, RANK)
    result = {}
    for kind in sys.argv[2:]:
        with distribution(kind).scope():
            result[kind] = {"loop": loop, "fit": fit}[sys.argv[1]]()
    print(json.dumps(result))
