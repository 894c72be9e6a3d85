"""The decoder's step as it is written by hand: float32 weights, one cast, optax.

As in jmp's documentation: the loss is float32 and scaled, and a step with a gradient
that is not finite keeps the weights. Attention is cuDNN's on a GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.compiled.cases import HEADS, LENGTH, VOCABULARY, WIDTH, Case
from benchmarks.compiled.devices import Device


def step(case: Case, device: Device) -> tuple[Any, tuple]:
    """The jitted step of a decoder, and the shapes of its arguments."""
    import optax

    half = device.half.removeprefix("mixed_")
    attention = "cudnn" if device.platform == "gpu" else "xla"
    adam = optax.adam(1e-4)

    def loss_of(weights: Any, ids: Any, labels: Any) -> Any:
        weights = jax.tree.map(lambda w: w.astype(half), weights)
        logits = _logits(weights, ids, attention).astype("float32")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    def take(state: Any, batch: Any) -> Any:
        weights, moments, scale, streak = state
        scales = half == "float16"

        def scaled(weights: Any) -> Any:
            loss = loss_of(weights, *batch)
            return loss * scale if scales else loss, loss

        gradients, loss = jax.grad(scaled, has_aux=True)(weights)
        if scales:
            gradients = jax.tree.map(lambda g: g / scale, gradients)
        updates, after = adam.update(gradients, moments, weights)
        updated = optax.apply_updates(weights, updates)
        if not scales:
            return loss, (updated, after, scale, streak)
        finite = jnp.all(
            jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)])
        )
        weights, moments = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (updated, after),
            (weights, moments),
        )
        streak = jnp.where(finite, streak + 1, 0)
        grown = jnp.where(streak % 2000 == 0, scale * 2, scale)
        scale = jnp.where(finite, grown, scale / 2)
        return loss, (weights, moments, scale, streak)

    weights = jax.eval_shape(lambda: _weights(case.depth))
    scale = jax.ShapeDtypeStruct((), "float32"), jax.ShapeDtypeStruct((), "int32")
    state = weights, jax.eval_shape(adam.init, weights), *scale
    return jax.jit(take, donate_argnums=0), (state, case.data())


def _weights(depth: int) -> dict[str, Any]:
    zeros, heads = jnp.zeros, (HEADS, WIDTH // HEADS)

    def block() -> dict[str, Any]:
        return {
            "norm": zeros((2, WIDTH)),
            **{name: zeros((WIDTH, *heads)) for name in ("query", "key", "value")},
            "output": zeros((*heads, WIDTH)),
            "second_norm": zeros((2, WIDTH)),
            "wide": zeros((WIDTH, 4 * WIDTH)),
            "wide_bias": zeros((4 * WIDTH,)),
            "narrow": zeros((4 * WIDTH, WIDTH)),
            "narrow_bias": zeros((WIDTH,)),
        }

    return {
        "embedding": zeros((VOCABULARY, WIDTH)),
        "positions": zeros((LENGTH, WIDTH)),
        "norm": zeros((2, WIDTH)),
        "blocks": [block() for _ in range(depth)],
    }


def _logits(weights: dict[str, Any], ids: Any, attention: str) -> Any:
    x = weights["embedding"][ids] + weights["positions"]
    for block in weights["blocks"]:
        y = _norm(x, block["norm"])
        query, key, value = (
            jnp.einsum("btd,dhk->bthk", y, block[name])
            for name in ("query", "key", "value")
        )
        y = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=attention
        )
        x = x + jnp.einsum("bthk,hkd->btd", y, block["output"])
        y = _norm(x, block["second_norm"]) @ block["wide"] + block["wide_bias"]
        y = jax.nn.gelu(y, approximate=False)
        x = x + y @ block["narrow"] + block["narrow_bias"]
    return _norm(x, weights["norm"]) @ weights["embedding"].T


def _norm(x: Any, weights: Any) -> Any:
    y = x.astype("float32")
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-3)
    return y.astype(x.dtype) * weights[0] + weights[1]
