"""Under our policies every layer of Keras computes what it computes in float32.

Hard inputs included: large ones, zeros, long sums, masked rows, raw data. What rounding
explains, and no more, is `sweeps.layer_errors.tolerance`.
"""

import functools

import keras
import pytest

import keras_mp
from sweeps.gradients import MODES
from sweeps.layer_cases import CASES, SKIPPED, cases
from sweeps.layer_errors import built, outcome, run

# On JAX a compiled step is what users run, and quicker than its operations one by one.
MODE = "jit" if "jit" in MODES else "eager"
# What Keras cannot compile on JAX.
NOT_COMPILED = {"MaxNumBoundingBoxes", "RandomCrop", "RandomElasticTransform"}
POLICIES = [keras_mp.MixedFloat16(), keras_mp.MixedBFloat16()]
ALL = cases(keras.backend.backend())


def pairs():
    """Each case under both policies; on JAX, which compiles long, under one in turn.

    `make sweep-layers` measures both there too.
    """
    for number, case in enumerate(ALL):
        here = POLICIES if "jit" not in MODES else [POLICIES[number % 2]]
        yield from (pytest.param(case, p, id=f"{case.name}-{p.name}") for p in here)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """What XLA is left to do, it does to float32 and half alike."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def mode_of(case):
    return "eager" if case.cls in NOT_COMPILED else MODE


@functools.lru_cache(maxsize=1)
def in_float32(case):
    layer = built(case, "float32")
    return layer, run(case, layer, mode_of(case))


@pytest.mark.filterwarnings("ignore")  # What layers say of hard inputs is not ours.
@pytest.mark.parametrize(("case", "policy"), list(pairs()))
def test_outputs_and_gradients_are_those_of_float32(case, policy):
    twin, expected = in_float32(case)
    layer = built(case, policy, twin)
    found = outcome(case, policy.compute_dtype, layer, expected, mode_of(case))
    assert found.status == "ok", found


def test_every_layer_class_has_a_case():
    classes = {v for v in vars(keras.layers).values() if isinstance(v, type)}
    measured = {getattr(keras.layers, case.cls) for case in CASES}
    skipped = {getattr(keras.layers, name) for name in SKIPPED}
    assert classes == measured | skipped
