"""Attention in half precision: what is computed, by which kernel of the device."""

import functools
import itertools
import re
from typing import NamedTuple

import keras
import numpy as np
import pytest
from backends import BACKEND, dtype_of
from keras import ops
from processes import on_four_devices
from products import lowered

pytestmark = pytest.mark.usefixtures("installed")

if BACKEND == "jax":
    import jax
    from jax.experimental.pallas.ops.tpu import splash_attention as splash_kernels

    from keras_mp.kernels.jax import cudnn_attention, splash_attention
    from keras_mp.repairs.jax import attention

on_jax = pytest.mark.skipif(BACKEND != "jax", reason="how JAX lowers it")
half = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
BATCH, HEADS, SIZE = 2, 4, 16


class Case(NamedTuple):
    """Lengths of queries and keys, heads of the keys, and what masks their logits.

    Attributes:
        mask, bias: the shape of each, or None.
        padding: whether the mask leaves out the last keys of each example.
        blind: whether it leaves out all keys of some queries, as of padding.
    """

    queries: int = 8
    keys: int = 8
    key_heads: int = HEADS
    mask: tuple | None = None
    bias: tuple | None = None
    causal: bool = False
    padding: bool = False
    blind: bool = False


CASES = {
    "plain": Case(),
    "causal": Case(causal=True),
    "odd": Case(7, 7),
    "odd and causal": Case(7, 7, causal=True),
    "odd queries": Case(7, 8),
    "odd keys": Case(8, 7),
    "mask": Case(mask=(BATCH, 1, 8, 8)),
    "mask of each head": Case(mask=(1, HEADS, 8, 8)),
    "padding": Case(mask=(BATCH, 1, 1, 8), padding=True),
    "odd padding": Case(7, 7, mask=(BATCH, 1, 1, 7), padding=True),
    "odd padding, causal": Case(7, 7, mask=(BATCH, 1, 1, 7), padding=True, causal=True),
    "bias": Case(bias=(1, HEADS, 8, 8)),
    "odd bias": Case(7, 7, bias=(1, HEADS, 7, 7)),
    "bias of keys": Case(bias=(BATCH, 1, 1, 8)),
}
if BACKEND != "torch":  # There such rows are 0, or nan.
    CASES |= {
        "blind": Case(mask=(BATCH, 1, 8, 8), blind=True),
        "odd and blind": Case(7, 7, mask=(BATCH, HEADS, 7, 7), blind=True),
        "blind and biased": Case(mask=(1, 1, 8, 8), bias=(1, HEADS, 8, 8), blind=True),
        "all blind": Case(8, 7, mask=(1, 1, 1, 7), blind=True),
    }
if BACKEND == "jax":  # What Keras takes there alone.
    CASES |= {
        "mask of rank 3": Case(mask=(BATCH, 8, 8)),
        "odd bias and mask": Case(7, 7, bias=(1, HEADS, 7, 7), mask=(BATCH, 1, 7, 7)),
        "grouped": Case(key_heads=2),
        "grouped, odd and masked": Case(7, 7, key_heads=1, mask=(BATCH, 1, 7, 7)),
    }
# Under one of the two dtypes in turn.
PAIRS = list(zip(CASES, itertools.cycle(ROUNDOFF), strict=False))
PAIRS += [(name, "bfloat16") for name in CASES if "blind" in name]
PAIRS = list(dict.fromkeys(PAIRS))
cases = pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(CASES[name], dtype, id=f"{name}-{dtype}") for name, dtype in PAIRS],
)


def tensors(case, dtype, seed=0):
    """Queries, keys, values and a cotangent in NumPy, rounded to the dtype."""
    random = np.random.default_rng(seed)
    shapes = [
        (BATCH, case.queries, HEADS, SIZE),
        (BATCH, case.keys, case.key_heads, SIZE),
        (BATCH, case.keys, case.key_heads, SIZE),
        (BATCH, case.queries, HEADS, SIZE),
    ]
    drawn = [random.normal(size=shape).astype("float32") for shape in shapes]
    return [ops.convert_to_numpy(ops.cast(x, dtype)) for x in drawn]


def options(case, dtype):
    random = np.random.default_rng(1)
    given = {"is_causal": case.causal}
    if case.padding:
        lengths = np.array([case.keys - 3, case.keys])
        given["mask"] = np.reshape(np.arange(case.keys) < lengths[:, None], case.mask)
    elif case.mask:
        given["mask"] = random.random(case.mask) < 0.7
        given["mask"][..., 0] = True  # A row has a key.
        if case.blind:
            given["mask"][..., -3:, :] = False
    if case.bias:
        bias = random.normal(size=case.bias).astype("float32")
        given["bias"] = ops.convert_to_numpy(ops.cast(bias, dtype))
    return given


def reference(case, dtype):
    """The attention, and the gradients of its sum with the cotangent, in float64."""
    q, k, v, g = (x.astype("float64") for x in tensors(case, dtype))
    given = options(case, dtype)
    group = HEADS // case.key_heads
    wide_k, wide_v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    logits = np.einsum("bqhd,bkhd->bhqk", q, wide_k) / SIZE**0.5
    if "bias" in given:
        logits = logits + given["bias"].astype("float64")
    allowed = np.ones_like(logits, bool)
    if "mask" in given:
        mask = given["mask"]
        allowed &= mask if mask.ndim == 4 else mask[:, None]
    if case.causal:
        allowed &= np.tri(case.queries, case.keys, dtype=bool)
    blind = ~allowed.any(-1, keepdims=True)
    logits = np.where(blind, 0, np.where(allowed, logits, -np.inf))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    result = np.einsum("bhqk,bkhd->bqhd", weights, wide_v)
    by_weights = np.einsum("bqhd,bkhd->bhqk", g, wide_v)
    mean = (by_weights * weights).sum(-1, keepdims=True)
    by_logits = np.where(blind, 0, weights * (by_weights - mean) / SIZE**0.5)
    by_k = np.einsum("bhqk,bqhd->bkhd", by_logits, q)
    by_v = np.einsum("bhqk,bqhd->bkhd", weights, g)
    of_group = (*k.shape[:3], group, SIZE)
    return [
        result,
        np.einsum("bhqk,bkhd->bqhd", by_logits, wide_k),
        by_k.reshape(of_group).sum(3),
        by_v.reshape(of_group).sum(3),
    ]


def agree(found, wanted, dtype):
    for got, want in zip(found, wanted, strict=True):
        got = ops.convert_to_numpy(ops.cast(got, "float32"))
        # Of queries, keys, weights, what they sum to, and what is returned.
        assert np.max(np.abs(got - want)) <= 5 * ROUNDOFF[dtype] * np.max(np.abs(want))


@cases
def test_attention_is_that_of_float64_but_for_rounding(case, dtype):
    q, k, v, _ = tensors(case, dtype)
    result = ops.dot_product_attention(q, k, v, **options(case, dtype))
    assert dtype_of(result) == dtype
    agree([result], reference(case, dtype)[:1], dtype)


def with_gradients(attend, case, dtype):
    q, k, v, g = tensors(case, dtype)
    result, pullback = jax.vjp(
        functools.partial(attend, **options(case, dtype)), q, k, v
    )
    return [result, *pullback(g)]


@on_jax
@cases
@pytest.mark.sampled
def test_so_are_its_gradients(case, dtype):
    found = with_gradients(ops.dot_product_attention, case, dtype)
    agree(found, reference(case, dtype), dtype)


@on_jax
@cases
@pytest.mark.sampled
def test_what_is_padded_for_the_fused_kernel_changes_nothing(case, dtype, monkeypatch):
    original = jax.nn.dot_product_attention
    lengths = []

    def on_cpus(q, k, v, bias, mask, implementation, **rest):
        assert implementation == "cudnn"
        lengths.append((q.shape[1], k.shape[1]))
        wide = (x if x is None else x.astype("float32") for x in (q, k, v, bias))
        return original(*wide, mask, implementation="xla", **rest).astype(q.dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_cpus)

    def attend(q, k, v, bias=None, mask=None, is_causal=False):
        if mask is not None:
            mask = attention._of_rank_4(mask, q)
        scale = SIZE**-0.5
        return cudnn_attention.attend(
            q, k, v, bias, mask, scale=scale, is_causal=is_causal
        )

    found = with_gradients(attend, case, dtype)
    agree(found, reference(case, dtype), dtype)
    assert lengths and not any(length % 2 for pair in lengths for length in pair)


def loss_and_gradients(case, dtype, wrap=lambda attend: attend, **more):
    """A function to lower, and its arguments."""
    attend = wrap(
        functools.partial(ops.dot_product_attention, **options(case, dtype), **more)
    )

    def loss(*tensors):
        return ops.sum(ops.cast(attend(*tensors), "float32"))

    return jax.value_and_grad(loss, (0, 1, 2)), tensors(case, dtype)[:3]


@on_jax
@cases
@pytest.mark.sampled
@pytest.mark.kernels
def test_it_lowers_to_the_fused_kernel_from_a_process_without_a_gpu(case, dtype):
    assert {device.platform for device in jax.devices()} == {"cpu"}
    text = lowered(*loss_and_gradients(case, dtype), "cuda")
    kinds = "fmhaScaleBiasSoftmax" if case.mask or case.bias else "fmhaSoftmax"
    assert text.count(f"@__cudnn${kinds}(") == 1
    assert text.count(f"@__cudnn${kinds}Backward(") == 1
    assert "dot_general" not in text
    for platform in ("cpu", "tpu", "rocm"):
        text = lowered(*loss_and_gradients(case, dtype), platform)
        assert "__cudnn" not in text and "dot_general" in text


@on_jax
@half
@pytest.mark.parametrize("wrapper", ["checkpoint", "jit"])
@pytest.mark.kernels
def test_so_it_does_within_other_transformations(wrapper, dtype):
    program = loss_and_gradients(Case(7, 7), dtype, getattr(jax, wrapper))
    text = lowered(*program, "cuda")
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert "dot_general" not in text


@on_jax
def test_it_is_no_function_of_its_own_in_the_program():
    """On a TPU its gradient would take longer (benchmarks/README.md, ViT)."""
    text = lowered(*loss_and_gradients(Case(7, 7), "bfloat16"), "tpu")
    functions = re.findall(r"func.func \w+ @(\w+)", text)
    assert not [name for name in functions if "attention" in name]


@on_jax
def test_on_cpus_products_are_float32():
    text = lowered(*loss_and_gradients(Case(), "bfloat16"), "cpu")
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and not any("bf16" in line for line in products)


@on_jax
@pytest.mark.parametrize(
    ("size", "fused"), [(8, True), (128, True), (12, False), (136, False)]
)
@pytest.mark.kernels
def test_which_heads_the_kernel_takes(size, fused):
    x = np.ones((BATCH, 8, HEADS, size), "float16")
    text = lowered(ops.dot_product_attention, (x, x, x), "cuda")
    assert ("__cudnn" in text) == fused


@on_jax
@pytest.mark.parametrize(
    ("capability", "size", "fused"),
    [("7.5", 64, False), ("8.0", 136, False), ("9.0", 136, True), ("10.0", 64, True)],
)
def test_the_gpu_of_the_process_decides(capability, size, fused, monkeypatch):
    class Gpu:
        compute_capability = capability

    monkeypatch.setattr(jax, "devices", lambda platform=None: [Gpu()])
    x = np.ones((BATCH, 8, HEADS, size), "float16")
    assert cudnn_attention.takes(x, x, x) == fused


BLOCKS = {
    "plain": Case(128, 256),
    "causal": Case(256, 256, causal=True),
    "grouped": Case(128, 128, key_heads=2),
}


@on_jax
@pytest.mark.parametrize("case", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.kernels
def test_on_a_tpu_it_is_the_splash_kernel(case, monkeypatch):
    text = lowered(*loss_and_gradients(case, "bfloat16"), "tpu")
    # And two of the gradient: by queries, and by keys and values. What each row of the
    # result has in common with its own gradient is no product of matrices.
    assert text.count("@tpu_custom_call(") == 3
    assert text.count("dot_general") == text.count("batching_dims = [0, 1, 2]") == 1
    make = functools.partial(splash_kernels.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_kernels, "make_splash_mha", make)

    def attend(*tensors, is_causal):
        scale = SIZE**-0.5
        return splash_attention.attend(*tensors, scale=scale, is_causal=is_causal)

    found = with_gradients(attend, case, "bfloat16")
    agree(found, reference(case, "bfloat16"), "bfloat16")


@on_jax
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(7, 7), "bfloat16"),
        (Case(128, 128, mask=(BATCH, 1, 1, 128)), "bfloat16"),
        (Case(128, 128), "float16"),  # A TPU has no kernel of it at all.
    ],
)
def test_what_the_splash_kernel_does_not_take(case, dtype):
    text = lowered(*loss_and_gradients(case, dtype), "tpu")
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert "custom_call" not in text and products
    assert not any("f16" in line for line in products) or dtype == "bfloat16"


@on_jax
@pytest.mark.kernels
def test_only_plain_attention_has_a_second_derivative():
    q, k, v, _ = tensors(Case(), "bfloat16")

    def second(**more):
        def loss(q):
            attended = ops.dot_product_attention(q, k, v, **more)
            return ops.sum(ops.cast(attended, "float32") ** 2)

        return jax.grad(lambda q: ops.sum(jax.grad(loss)(q)).astype("float32"))(q)

    with pytest.raises(NotImplementedError, match="Differentiation rule"):
        second()
    assert np.isfinite(np.asarray(second(flash_attention=False), "float32")).all()


@on_jax
def test_keras_own_switch_asks_for_plain_attention():
    keras.config.disable_flash_attention()
    try:
        layer = keras.layers.MultiHeadAttention(HEADS, SIZE, dtype="mixed_float16")
    finally:
        keras.config.enable_flash_attention()
        keras.backend.clear_session()
    x = np.ones((BATCH, 8, 64), "float16")
    layer.build(x.shape, x.shape)
    assert "__cudnn" not in lowered(lambda x: layer(x, x), (x,), "cuda")


@on_jax
def test_who_wants_no_fused_kernel_gets_none():
    program = loss_and_gradients(Case(), "float16", flash_attention=False)
    assert "__cudnn" not in lowered(*program, "cuda")


@on_jax
@pytest.mark.kernels
def test_jax_goes_on_asking_for_cudnn_elsewhere():
    text = lowered(*loss_and_gradients(Case(), "float16"), "cuda")
    assert "__cudnn" in text
    q, k, v, _ = tensors(Case(), "float16")
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    # Keras asks the same.
    with pytest.raises(RuntimeError, match="cuDNN"):
        ops.dot_product_attention(q, k, v, flash_attention=True)
    # And what was replaced for a while is JAX's own again.
    from jax._src.cudnn import fused_attention_stablehlo

    check = fused_attention_stablehlo.check_cudnn_version
    assert check.__module__.startswith("jax.")


@on_jax
@pytest.mark.slow("Several devices or processes; one such test stays in `make test`.")
def test_heads_that_stand_on_two_devices_train_alike():
    (losses, whole), (found, part) = on_four_devices("attention_on_devices.py").values()
    assert (whole, part) == ([32, 4, 8], [32, 2, 8])
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    assert losses[-1] < losses[0]
