"""A mixed train step of TensorFlow beside the float32 step, compiled for an H100.

Read from the programs, which are never run: `make gpu-gates`. JAX's are in
`test_whole_steps.py`.
"""

import functools
import os

import keras
import pytest

if keras.backend.backend() != "tensorflow" or "KERAS_MP_GPU_TARGET" not in os.environ:
    pytest.skip("make gpu-gates", allow_module_level=True)

import tensorflow as tf
from test_fused_attention import cases, options, tensors
from whole_steps import products, written

import keras_mp
from benchmarks.compiled.cases import CASES
from benchmarks.compiled.compiled_tables import FLOAT32, KERAS, OURS
from benchmarks.compiled.devices import DEVICES
from benchmarks.compiled.private import as_if_there, compiled
from benchmarks.compiled.roofline import cost_of
from benchmarks.compiled.steps import program_of
from keras_mp.kernels.tensorflow.cudnn_attention import ASKED_FOR
from keras_mp.policies import weights

# Peak memory, of the float32 step's, is at most this: measured, then rounded up.
MEMORY = {"decoder": 0.71, "MLP": 0.96, "ViT": 0.62, "ResNet-50": 0.60}

of_each_model = pytest.mark.parametrize("model", MEMORY)


@functools.cache
def step(model, way):
    keras.backend.clear_session()
    return program_of(CASES[model], DEVICES["H100"], way)


def float32_products(program):
    found = list(products(program.text))
    assert found
    return [f"{each} of {each.source}" for each in found if "f32" in each.operands]


@of_each_model
def test_no_product_of_a_mixed_step_has_a_float32_operand(model):
    assert float32_products(step(model, FLOAT32))
    assert not float32_products(step(model, OURS))


@of_each_model
def test_its_peak_memory_is_bounded_by_that_of_float32(model):
    ratio = step(model, OURS).peak / step(model, FLOAT32).peak
    assert ratio <= MEMORY[model], f"{ratio:.3f}"


@of_each_model
def test_it_is_not_more_than_with_keras_own_policy(model):
    # The MLP's is that of weights and slots, and a few scalars.
    assert step(model, OURS).peak <= 1.001 * step(model, KERAS).peak


# As in `test_steps_beside_keras.py`, of JAX: kernels more than Keras' own, and hidden
# bytes over its.
LAUNCHES = {"MLP": 3, "decoder": 18, "ViT": 0, "ResNet-50": 0}
HIDDEN = {"MLP": 1.10, "decoder": 0.84, "ViT": 1, "ResNet-50": 1}


@of_each_model
def test_it_launches_no_more_kernels_and_hides_no_more_bytes(model):
    ours, keras_own = (
        cost_of(step(model, way).text, DEVICES["H100"]) for way in (OURS, KERAS)
    )
    assert ours.launches - keras_own.launches <= LAUNCHES[model]
    ratio = ours.hidden / keras_own.hidden
    assert ratio <= HIDDEN[model], f"{ratio:.3f}"


def test_whole_logits_of_a_decoder_are_never_there():
    whole = 8, 512, 50257
    plain, chunks = step("decoder", FLOAT32), step("decoder", OURS)
    flat = whole[0] * whole[1], whole[2]
    assert written(plain.text, whole) | written(plain.text, flat) == {"f32"}
    assert "f32" not in written(chunks.text, whole) | written(chunks.text, flat)


def test_attention_that_is_asked_for_is_cudnns(monkeypatch):
    monkeypatch.setenv(ASKED_FOR, "1")
    fused = step.__wrapped__("decoder", OURS)
    blocks = CASES["decoder"].depth
    for name in ("Softmax", "SoftmaxBackward"):
        assert fused.text.count(f'"__cudnn$fmha{name}"') == blocks
    assert fused.peak / step("decoder", FLOAT32).peak <= 0.59
    assert not float32_products(fused)


@cases
def test_it_is_compiled_with_masks_and_biases(case, dtype, monkeypatch):
    monkeypatch.setenv(ASKED_FOR, "1")
    keras_mp.install()
    given = options(case, dtype)

    @tf.function(jit_compile=True)
    def attend(query, key, value, gradient):
        with tf.GradientTape() as tape:
            tape.watch((query, key, value))
            result = keras.ops.dot_product_attention(query, key, value, **given)
        return tape.gradient(result, (query, key, value), gradient)

    device = DEVICES["H100"]
    with as_if_there(device, device.sharding()):
        traced = attend.experimental_get_compiler_ir(*tensors(case, dtype))
        program = traced(stage="stablehlo_serialized")
    found = compiled(program, device.sharding(), {}).hlo_modules()[0].to_string()
    kind = "ScaleBiasSoftmax" if case.mask or case.bias else "Softmax"
    for name in (kind, f"{kind}Backward"):
        assert found.count(f'"__cudnn$fmha{name}"') == 1


def test_the_gate_sees_a_head_in_float32(monkeypatch):
    monkeypatch.setattr(weights, "LARGE", 2**40)
    # The product and the two of its gradient.
    assert len(float32_products(step.__wrapped__("MLP", OURS))) == 3
