"""What a roofline leaves out of a step, beside Keras' own policy: JAX, for an H100.

Read from the programs, which are never run: `make gpu-gates`. Each kernel is launched,
and bytes that move while a product is computed take about half of their time.
"""

import functools
import os

import keras
import pytest

if keras.backend.backend() != "jax" or "KERAS_MP_GPU_TARGET" not in os.environ:
    pytest.skip("make gpu-gates", allow_module_level=True)

from benchmarks.compiled.cases import CASES
from benchmarks.compiled.compiled_tables import KERAS, OURS
from benchmarks.compiled.devices import DEVICES
from benchmarks.compiled.roofline import cost_of
from benchmarks.compiled.steps import program_of

# Kernels more than Keras' own: four numbers that loss scaling keeps, with a copy each;
# and in a decoder those of each chunk of its loss.
LAUNCHES = {"MLP": 8, "decoder": 4, "ViT": 0, "ResNet-50": 0}
# Hidden bytes over Keras' own: float32 outputs are twice as many as in half precision.
HIDDEN = {"MLP": 1.10, "decoder": 1.23, "ViT": 1, "ResNet-50": 1}


@functools.cache
def cost(model, way):
    keras.backend.clear_session()
    device = DEVICES["H100"]
    return cost_of(program_of(CASES[model], device, way).text, device)


@pytest.mark.parametrize("model", LAUNCHES)
def test_it_launches_no_more_kernels(model):
    more = cost(model, OURS).launches - cost(model, KERAS).launches
    assert more <= LAUNCHES[model]


@pytest.mark.parametrize("model", HIDDEN)
def test_no_more_bytes_are_hidden_under_products(model):
    ratio = cost(model, OURS).hidden / cost(model, KERAS).hidden
    assert ratio <= HIDDEN[model], f"{ratio:.3f}"
