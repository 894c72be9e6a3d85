"""On several devices and processes of JAX: one skips, all skip, and all go on alike."""

import functools
import json
import os

import keras
import numpy as np
import processes
import pytest
from backends import BACKEND
from step_sequences import SEQUENCES

import keras_mp

if BACKEND != "jax":
    pytest.skip("engines of JAX", allow_module_level=True)

KINDS = ["data", "model"]


def run(*args, across=1):
    """What each process prints, on four devices of one or on one of each of two."""
    devices = 4 if across == 1 else 1
    flags = (
        f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    )
    return processes.run(
        "engine_jax.py",
        *args,
        processes=across,
        JAX_PLATFORMS="cpu",
        JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
        XLA_FLAGS=flags,
    )


@functools.cache
def expected_traces():
    return json.loads(json.dumps({n: s.expected() for n, s in SEQUENCES.items()}))


@pytest.mark.parametrize(
    "kind, number", [("data", 1), ("model", 1), ("data", 2)],
    ids=["DataParallel", "ModelParallel", "two processes"],
)  # fmt: skip
def test_every_sequence_of_steps_follows_the_oracle_to_the_bit(kind, number):
    for result in run("loop", kind, across=number):
        loop = result[kind]
        for name, trace in expected_traces().items():
            assert loop["traces"][name] == trace, name
        assert loop["diverged"] == {"nothing but inf, down to the floor": [5]}
        # JAX rewrites P(None, None) as P() once under a mesh of two axes, and compiles
        # again: with any optimizer that has a replicated matrix.
        assert loop["compilations"] == {"data": 1, "model": 2}[kind]
        # The scale, its counters and the counts by variable are on every device.
        slots = {"data": [], "model": ["matrix", "matrix_momentum"]}
        assert loop["sharded"] == slots[kind]


@pytest.mark.parametrize("number", [1, 2], ids=["one process", "two processes"])
def test_fit_forgets_a_step_that_one_device_makes_all_skip(number):
    for result in run("fit", *KINDS, across=number):
        for kind in KINDS:
            clean = result[kind]["clean"]
            assert (clean["scale"], clean["skipped"]) == (128.0, 0)
            for where in ("first", "last"):
                fit = result[kind][where]
                # Weights, slots, iterations, statistics, metrics: to the bit.
                assert fit["values"] == clean["values"]
                assert fit["history"] == clean["history"]
                # One overflow halved the scale, one broken batch did not.
                assert (fit["scale"], fit["skipped"]) == (128.0, 2)
                assert (fit["consecutive"], fit["last finite"]) == (0, True)
                assert fit["nonfinite"] == 6
                assert fit["compilations"] == 1
                assert fit["sharded"] == clean["sharded"] == SHARDED[kind]


def test_weights_whose_types_say_how_they_are_sharded_are_trained_and_skipped():
    import jax

    axis = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((1,), ("model",), axis_types=(axis,))
    places = {
        name: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for name, axes in {"columns": (None, "model"), "rows": ("model", None)}.items()
    }
    ones = np.ones((3, 3), "float32")
    # Looked at alone, and together.
    names = ["rows", *(f"columns_{number}" for number in range(16))]
    optimizer = keras_mp.LossScaleOptimizer("adam", initial_scale=256.0)
    optimizer.build([keras.Variable(ones, name=name) for name in names])

    def placed(variable):
        place = [p for name, p in places.items() if name in variable.path]
        return jax.device_put(variable.value, *place)

    state = [placed(v) for v in optimizer.variables]

    @jax.jit
    def step(weights, state, grads):
        optimizer.stateless_scale_loss(state, 1.0)
        return optimizer.stateless_apply(state, grads, weights)

    before = [placed(v) for v in optimizer._trainable_variables]
    grads = [256 * w for w in before]
    after, state = step(before, state, grads)
    kept, state = step(after, state, [*grads[:-1], np.inf * grads[-1]])
    for old, new, last in zip(before, after, kept, strict=True):
        assert not np.array_equal(old, new) and np.array_equal(new, last)
        assert old.sharding == new.sharding == last.sharding


SLOTS = ["average", "momentum", "velocity"]
SHARDED = {
    "data": [],
    "model": ["kernel", "bias", *(
        f"dense_{name}_{slot}" for slots in (SLOTS[:1], SLOTS[1:])
        for name in ("kernel", "bias") for slot in slots
    )],
}  # fmt: skip
