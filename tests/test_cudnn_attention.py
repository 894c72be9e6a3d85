"""TensorFlow's attention by cuDNN: what is called, and what is made of the results.

No GPU is here: a stand-in computes what cuDNN would, by the settings of each call. JAX,
whose calls GPUs have run, makes the same ones. `make gpu-gates` compiles steps with it.
"""

import json
import re
from unittest import mock

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the calls of TensorFlow", allow_module_level=True)

import tensorflow as tf
from keras import layers, ops
from test_fused_attention import SIZE, agree, cases, options, reference, tensors

import keras_mp
from keras_mp.backends.tensorflow import private
from keras_mp.kernels.tensorflow import cudnn_attention

pytestmark = [pytest.mark.usefixtures("installed"), pytest.mark.kernels]
NAME = cudnn_attention.ASKED_FOR


@pytest.fixture
def calls(monkeypatch):
    """The calls of cuDNN, (name, settings) each, on a GPU that is not there."""
    made = []

    def custom_call(target, operands, results, settings):
        made.append((target, json.loads(settings)["cudnn_fmha_backend_config"]))
        found = stand_in(*made[-1], operands)
        for tensor, spec in zip(found, results, strict=True):
            assert spec.is_compatible_with(tensor)
        return found

    monkeypatch.setenv(NAME, "1")
    monkeypatch.setattr(private, "is_for_gpu", lambda: True)
    monkeypatch.setattr(private, "custom_call", custom_call)
    return made


def product(config, name, a, b):
    """What the settings say of a product: batch, heads, and the other two axes."""
    axes = config[f"{name}_dot_dimension_numbers"]
    letters = []
    for side, free in (("lhs", "x"), ("rhs", "y")):
        names = dict(zip(map(int, axes[f"{side}_batch_dimensions"]), "bn", strict=True))
        (contracted,) = axes[f"{side}_contracting_dimensions"]
        names[int(contracted)] = "c"
        letters.append("".join(names.get(axis, free) for axis in range(4)))
    return tf.einsum(f"{letters[0]},{letters[1]}->bnxy", a, b)


def stand_in(target, config, operands):
    """The results of a call in float32, as JAX describes them."""
    is_backward, has_bias = "Backward" in target, "ScaleBias" in target
    dtype = operands[0].dtype
    assert config["intermediate_tensor_shape"]["element_type"] == {
        tf.float16: "F16",
        tf.bfloat16: "BF16",
    }.get(dtype)
    first = 5 if is_backward else 3
    query, key, value, *sums_and_gradient = (
        tf.cast(x, tf.float32) for x in operands[:first]
    )
    bias = tf.cast(operands[first], tf.float32) if has_bias else tf.zeros((1, 1, 1, 1))
    lengths = operands[first + has_bias + is_backward :]

    def scores():
        numbers = {"bmm1_dot_dimension_numbers": FORWARD} if is_backward else config
        found = config["fmha_scale"] * product(numbers, "bmm1", query, key) + bias
        batch, heads, rows, columns = found.shape
        assert config["intermediate_tensor_shape"]["dimensions"] == [
            str(n) for n in (batch, heads, rows, columns)
        ]
        seen = tf.ones((batch, 1, rows, columns), bool)
        if "CAUSAL" in config["mask_type"]:
            seen &= tf.constant(np.tri(rows, columns, dtype=bool))
        assert ("PADDING" in config["mask_type"]) == bool(lengths)
        if lengths:
            seen &= tf.range(columns) < lengths[1][:, None, None, None]
        return tf.where(seen, found, -np.inf)

    found = scores()
    space = tf.zeros((0,), tf.uint8)
    if not is_backward:
        sums = tf.reduce_logsumexp(found, -1)
        weights = tf.exp(found - sums[..., None])
        return tf.cast(product(config, "bmm2", weights, value), dtype), sums, space
    sums, gradient = sums_and_gradient
    result = tf.cast(operands[first + has_bias], tf.float32)
    weights = tf.exp(found - sums[..., None])
    by_weights = product(config, "bmm2_grad_gemm2", gradient, value)
    mean = tf.transpose(tf.reduce_sum(gradient * result, -1), (0, 2, 1))
    by_scores = weights * (by_weights - mean[..., None])
    scaled = config["fmha_scale"] * by_scores
    grads = [
        product(config, "bmm1_grad_gemm2", scaled, key),
        product(config, "bmm1_grad_gemm1", scaled, query),
        product(config, "bmm2_grad_gemm1", weights, gradient),
    ]
    if has_bias:
        summed = [i for i in range(4) if bias.shape[i] < by_scores.shape[i]]
        grads.append(tf.reduce_sum(by_scores, summed, keepdims=True))
    return *(tf.cast(x, dtype) for x in grads), space


# (batch, length, heads, size) of both operands.
FORWARD = {
    "lhs_contracting_dimensions": ["3"],
    "rhs_contracting_dimensions": ["3"],
    "lhs_batch_dimensions": ["0", "2"],
    "rhs_batch_dimensions": ["0", "2"],
}


def with_gradients(case, dtype, **more):
    given = options(case, dtype) | more

    @tf.function(jit_compile=True)
    def run(query, key, value, gradient):
        with tf.GradientTape() as tape:
            tape.watch((query, key, value))
            result = ops.dot_product_attention(query, key, value, **given)
        return [result, *tape.gradient(result, (query, key, value), gradient)]

    return run(*map(tf.constant, tensors(case, dtype)))


@cases
def test_results_and_gradients_are_those_of_float64(case, dtype, calls):
    agree(with_gradients(case, dtype), reference(case, dtype), dtype)
    kind = "ScaleBiasSoftmax" if case.mask or case.bias else "Softmax"
    names = [f"__cudnn$fmha{kind}", f"__cudnn$fmha{kind}Backward"]
    assert [name for name, _ in calls] == names


@cases
def test_jax_makes_the_same_calls(case, dtype, calls):
    jax = pytest.importorskip("jax")
    from jax._src.cudnn import fused_attention_stablehlo as of_jax

    with_gradients(case, dtype)
    given = options(case, dtype)

    def even(x, axes):
        return jax.numpy.pad(x, [(0, x.shape[i] % 2 * (i in axes)) for i in range(4)])

    def attend(query, key, value):
        rows, columns = query.shape[1], key.shape[1]
        masks = {
            name: jax.numpy.ones((*given[name].shape[:2], rows, columns), kind)
            for name, kind in (("mask", "bool"), ("bias", dtype))
            if name in given
        }
        lengths = {}
        if columns % 2 and not masks:
            lengths = {
                "query_seq_lengths": jax.numpy.full(len(query), rows),
                "key_value_seq_lengths": jax.numpy.full(len(key), columns),
            }
        return jax.nn.dot_product_attention(
            *(even(x, [1]) for x in (query, key, value)),
            **{name: even(x, [2, 3]) for name, x in masks.items()},
            **lengths,
            implementation="cudnn",
            is_causal=case.causal,
        ).sum()

    shapes = [jax.ShapeDtypeStruct(x.shape, dtype) for x in tensors(case, dtype)[:3]]
    with mock.patch.object(of_jax, "check_cudnn_version", lambda: 91000):
        traced = jax.jit(jax.grad(attend, (0, 1, 2))).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    theirs = re.findall(
        r'custom_call @(__cudnn[$\w]+)\(.*backend_config = "(.*?)"', text
    )
    assert [name for name, _ in calls] == [name for name, _ in theirs]
    for (_, ours), (_, settings) in zip(calls, theirs, strict=True):
        settings = json.loads(settings.replace("\\22", '"'))
        assert not differences(ours, settings["cudnn_fmha_backend_config"])


def differences(ours, theirs, name=""):
    """Settings that differ, but for theirs that are as by default."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        names = [*ours, *(each for each in theirs if each not in ours)]
        found = [differences(ours.get(n), theirs.get(n), n) for n in names]
        return [each for pairs in found for each in pairs]
    unset = (
        ours is None and theirs in (0, "0", 42, [], False) or "INVALID" in f"{theirs}"
    )
    return [] if unset or ours == theirs else [(name, ours, theirs)]


def test_it_waits_to_be_asked_for(calls, monkeypatch):
    case, dtype = cases.args[1][0].values
    monkeypatch.delenv(NAME)
    agree(with_gradients(case, dtype), reference(case, dtype), dtype)
    assert not calls
    monkeypatch.setenv(NAME, "yes")
    with pytest.raises(ValueError, match=f"`{NAME}` must be 0 or 1. Received"):
        with_gradients(case, dtype)


@pytest.mark.parametrize("kind", ["no GPU", "not asked to fuse", "capped", "learned"])
def test_what_it_does_not_take_is_computed_as_before(kind, calls, monkeypatch):
    case, dtype = cases.args[1][0].values
    if kind == "no GPU":
        monkeypatch.setattr(private, "is_for_gpu", lambda: False)
    more = {
        "not asked to fuse": {"flash_attention": False},
        "capped": {"attn_logits_soft_cap": 50.0},
        "learned": {"scale": tf.constant(SIZE**-0.5)},
    }.get(kind, {})
    if kind == "capped":  # Keras has none on TensorFlow.
        with pytest.raises((TypeError, ValueError)):
            with_gradients(case, dtype, **more)
    else:
        agree(with_gradients(case, dtype, **more), reference(case, dtype), dtype)
    assert not calls


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("length", [6, 7])
def test_a_model_trains_with_it_as_without(policy, length, calls, monkeypatch):
    keras_mp.set_global_policy(policy)
    random = np.random.default_rng(0)
    x = random.normal(size=(12, length, 16)).astype("float32")
    y = random.normal(size=(12, length, 3)).astype("float32")

    def trained():
        keras.utils.set_random_seed(0)
        tokens = keras.Input((length, 16), batch_size=4)
        attended = layers.MultiHeadAttention(2, 8)(tokens, tokens, use_causal_mask=True)
        model = keras.Model(tokens, layers.Dense(3)(attended + tokens))
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        losses = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history["loss"]
        return losses, [ops.convert_to_numpy(v) for v in model.trainable_variables]

    losses, weights = trained()
    assert calls
    calls.clear()
    monkeypatch.setenv(NAME, "0")
    plain_losses, plain_weights = trained()
    assert not calls
    step = 2.0**-8 if policy == "mixed_float16" else 2.0**-5
    np.testing.assert_allclose(losses, plain_losses, rtol=step)
    for weight, plain in zip(weights, plain_weights, strict=True):
        np.testing.assert_allclose(weight, plain, atol=step)
