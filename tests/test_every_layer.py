"""Under our policies every layer of Keras computes what it computes in float32.

Hard inputs included: large ones, zeros, long sums, masked rows, raw data. What rounding
explains, and no more, is `sweeps.layer_errors.tolerance`.
"""

import itertools

import keras
import pytest

import keras_mp
from sweeps.layer_cases import CASES, SKIPPED, cases
from sweeps.layer_errors import built, outcome, run
from sweeps.layer_gradients import MODES

pytestmark = pytest.mark.usefixtures("installed")

# On JAX a compiled step is what users run, and quicker than its operations one by one.
MODE = "jit" if "jit" in MODES else "eager"
# What Keras cannot compile on JAX, and what takes XLA a minute: `make sweep-layers`
# compiles that.
NOT_COMPILED = {"MaxNumBoundingBoxes", "RandomCrop", "RandomElasticTransform"}
NOT_COMPILED |= {"AugMix", "RandAugment"}
# Thousands of operations, which TensorFlow is quicker at in the loop of a graph.
LONG = {"LSTM, 300 steps", "LSTM, cell state past 2048"}
POLICIES = [keras_mp.MixedFloat16(), keras_mp.MixedBFloat16()]
ALL = cases(keras.backend.backend())


# Each case under one of the two policies in turn: `make sweep-layers` measures both.
PAIRS = [
    pytest.param(case, policy, id=f"{case.name}-{policy.name}")
    for case, policy in zip(ALL, itertools.cycle(POLICIES), strict=False)
]


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
    if case.name in LONG and "graph" in MODES:
        return "graph"
    return "eager" if case.cls in NOT_COMPILED else MODE


@pytest.mark.filterwarnings("ignore")  # What layers say of hard inputs is not ours.
@pytest.mark.parametrize(("case", "policy"), PAIRS)
@pytest.mark.sampled(by=lambda case, policy: case.cls)
def test_outputs_and_gradients_are_those_of_float32(case, policy):
    twin = built(case, "float32")
    expected = run(case, twin, mode_of(case))
    layer = built(case, policy, twin)
    found = outcome(case, policy.compute_dtype, layer, expected, mode_of(case))
    assert found.status == "ok", found


def test_every_layer_class_has_a_case():
    classes = {v for v in vars(keras.layers).values() if isinstance(v, type)}
    measured = {getattr(keras.layers, case.cls) for case in CASES}
    skipped = {getattr(keras.layers, name) for name in SKIPPED}
    assert classes == measured | skipped
