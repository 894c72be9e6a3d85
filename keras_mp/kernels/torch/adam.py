"""Keras' Adam and AdamW on torch, with an update in one kernel for all variables.

Keras takes ten kernels, with copies of all weights between them.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import ops

import keras_mp.keras_private as private
from keras_mp.backends.torch.private import fused_adam
from keras_mp.backends.torch.sharding import local
from keras_mp.backends.torch.step import HAVE_KERNELS
from keras_mp.loss_scaling.stage import in_scaled_update
from keras_mp.types import Gradients, Optimizer, Tensor, Variables


def in_one_kernel(original: Callable) -> Callable:
    """Wraps the update step of Keras' Adam, for those that scale their loss.

    Clipping, decay, averages and accumulation stay Keras' own.
    """

    @functools.wraps(original)
    def update_step(
        self: Any, grads: Gradients, variables: Variables, learning_rate: Tensor
    ) -> None:
        scaled = in_scaled_update() and _is_adam(type(self))
        if not (scaled and _updated(self, grads, variables, learning_rate)):
            original(self, grads, variables, learning_rate)

    return update_step


def _is_adam(kind: type) -> bool:
    # A user's subclass may compute something else.
    return private.is_keras_own(kind) and kind.__name__ in ("Adam", "AdamW")


def _updated(
    optimizer: Optimizer,
    grads: Sequence[Tensor],
    variables: Variables,
    learning_rate: Tensor,
) -> bool:
    """Updates variables in one kernel, if there is one for them."""
    # Each process updates its own shards.
    weights, parts = [local(v.value) for v in variables], [*map(local, grads)]
    slots = [[*map(local, x)] for x in private.adam_slots(optimizer, variables)]
    if not _have_kernel([*weights, *itertools.chain(*slots)], parts):
        return False
    step = ops.cast(optimizer.iterations + 1, "float32")
    corrections = torch.sqrt(1 - optimizer.beta_2**step) / (1 - optimizer.beta_1**step)
    # Keras adds epsilon before it corrects. So the rate holds both corrections, and the
    # kernel gets an infinite step, for which its own corrections are 1.
    fused_adam()(
        weights,
        [g.contiguous() for g in parts],
        *slots,
        [torch.full_like(step, torch.inf)] * len(weights),
        lr=ops.convert_to_tensor(learning_rate) * corrections,
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        weight_decay=0.0,
        eps=optimizer.epsilon,
        amsgrad=optimizer.amsgrad,
        maximize=False,
    )
    return True


def _have_kernel(written: Sequence[torch.Tensor], grads: Sequence[Tensor]) -> bool:
    device = written[0].device
    return (
        device.type in HAVE_KERNELS
        and not torch.compiler.is_compiling()  # It has no shapes for a tensor rate.
        and private.get_stateless_scope() is None
        and all(x.dtype == torch.float32 and x.device == device for x in grads)
        # The kernel silently computes something else if memory is in another order.
        and all(
            x.dtype == torch.float32 and x.device == device and x.is_contiguous()
            for x in written
        )
    )
