"""A mixed train step beside the float32 step, as XLA compiles them for an accelerator.

Read from the programs, which are never run: `make gpu-gates` compiles them for an H100,
`make tpu-gates` for a TPU v5e. Attention is a fused kernel in the mixed steps, and
plain products in float32's.
"""

import re

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("programs of XLA, as JAX makes them", allow_module_level=True)

from compiled_steps import platform, sharding

if sharding() is None:
    pytest.skip("make gpu-gates, make tpu-gates", allow_module_level=True)

from whole_steps import bfloat16_step, fused_products, whole_step, written

from keras_mp.policies import weights

HALF = {"gpu": "mixed_float16", "tpu": "mixed_bfloat16"}[platform()]
# Peak memory, of the float32 step's, is at most this: measured, then rounded up.
MEMORY = {
    "gpu": {"MLP": 0.96, "decoder": 0.79, "ViT": 0.48, "ResNet-50": 0.58},
    "tpu": {"MLP": 0.94, "decoder": 0.84, "ViT": 0.80, "ResNet-50": 0.60},
}[platform()]
# Products of a mixed step with a float32 operand, by the operation that they come from.
EXPLAINED = {
    "tpu": {
        r"transpose\(.*BTNH,BSNH->BNTS": "JAX's attention makes float32 logits, so that"
        " their gradient is float32; a TPU rounds it to bfloat16 on the way in",
    }
}.get(platform(), {})

of_each_model = pytest.mark.parametrize("model", MEMORY)


def float32_products(step):
    """Those that nothing explains."""
    return [
        f"{product} of {product.source}"
        for product in step.products
        if "f32" in product.operands
        and not any(re.search(source, product.source) for source in EXPLAINED)
    ]


@of_each_model
def test_no_product_of_a_mixed_step_has_a_float32_operand(model):
    step = whole_step(model, HALF)
    assert step.products, step
    assert not float32_products(step), step


@of_each_model
def test_it_has_as_many_products_as_the_float32_step(model):
    plain, step = whole_step(model, "float32"), whole_step(model, HALF)
    products = len(step.products) + fused_products(step.program.text)
    # The loss makes a head's product in chunks, and then those of its gradient. XLA may
    # name the kernel's after the embedding whose gradient is added.
    in_chunks = sum(
        bool(re.search("crossentropy|embedding", product.source))
        for product in step.products
    )
    products -= max(0, in_chunks - 3)
    assert products == len(plain.products), f"{step}\nfloat32: {plain}"


@pytest.mark.parametrize("model", ["decoder", "ViT"])
def test_attention_is_a_fused_kernel_and_its_gradient_too(model):
    # Of both blocks. An image has 197 tokens, which a TPU's kernel does not take.
    blocks = 0 if (platform(), model) == ("tpu", "ViT") else 2
    assert fused_products(whole_step(model, HALF).program.text) == blocks * (2 + 4)


@of_each_model
def test_it_has_no_conditional(model):
    step = whole_step(model, HALF)
    assert step.program.count("conditional") == 0, step


@of_each_model
def test_its_peak_memory_is_bounded_by_that_of_float32(model):
    plain, step = whole_step(model, "float32"), whole_step(model, HALF)
    ratio = step.program.peak / plain.program.peak
    assert ratio <= MEMORY[model], f"{ratio:.3f}\n{step}\nfloat32: {plain}"


def test_logits_that_are_recomputed_are_never_there():
    kept = whole_step("decoder", HALF)
    step = whole_step("decoder", HALF, recompute_logits=True)
    logits = 4 * 8 * 512 * 50257
    assert not written(step.program.text, (8, 512, 50257))
    # A quarter of them is there at a time, and a quarter of their gradient. What is
    # kept elsewhere is float32 on a TPU, and the gradient in half precision on a GPU.
    saved = kept.program.peak - step.program.peak
    least = logits / (2 if platform() == "tpu" else 10)
    assert saved > least, f"{step}\nkept: {kept}"


LOGITS = {
    "decoder": (8, 12, 512, 512),
    "dropout": (8, 12, 512, 512),
    "ViT": (32, 12, 197, 197),
}


@pytest.mark.parametrize("model", LOGITS)
def test_no_logits_of_attention_are_written_in_float32(model):
    if (platform(), model) == ("tpu", "ViT"):
        pytest.skip("JAX's attention makes them there, and a TPU's kernel takes no 197")
    plain, step = (whole_step(model, policy) for policy in ("float32", HALF))
    assert "f32" in written(plain.program.text, LOGITS[model]), plain
    assert "f32" not in written(step.program.text, LOGITS[model]), step


WEIGHTS = [(50257, 768), (768, 3072), (3072, 768), (768, 12, 64)]


@pytest.mark.filterwarnings("ignore:Optimizer 'adam' updates bfloat16 weights")
def test_stochastic_rounding_costs_nothing_and_keeps_no_float32_weights():
    plain, step = (bfloat16_step("decoder", rounded) for rounded in (False, True))
    for shape in WEIGHTS:
        assert "f32" not in written(step.program.text, shape), f"{shape}\n{step}"
        assert "bf16" in written(step.program.text, shape), f"{shape}\n{step}"
    assert step.program.peak <= 1.03 * plain.program.peak, f"{step}\nplain: {plain}"
    moved, least = step.program.accessed, plain.program.accessed
    assert moved <= 1.03 * least, f"{moved / least:.3f}\n{step}\nplain: {plain}"


def test_the_policy_bfloat16_keeps_no_float32_weights():
    plain, step = whole_step("decoder", "float32"), whole_step("decoder", "bfloat16")
    for shape in WEIGHTS:
        assert written(step.program.text, shape) == {"bf16"}, f"{shape}\n{step}"
    assert step.products and not float32_products(step), step
    ratio = step.program.peak / plain.program.peak
    bound = {"gpu": 0.61, "tpu": 0.67}[platform()]  # Measured, then rounded up.
    assert ratio <= bound, f"{ratio:.3f}\n{step}\nfloat32: {plain}"


def test_the_gate_sees_a_head_in_float32(monkeypatch):
    monkeypatch.setattr(weights, "LARGE", 2**40)
    step = whole_step.__wrapped__("MLP", HALF)
    # The product and the two of its gradient.
    assert len(float32_products(step)) == 3, step
