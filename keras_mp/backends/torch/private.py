"""The private names of torch that keras_mp uses, each with the reason."""

import torch

# A tensor inside `torch.vmap` must not leave it, and `torch.func` does not know a
# function of ours that defines its own derivative. No public name tells.
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def is_watched(x: torch.Tensor) -> bool:
    """Does somebody want the gradient of a tensor that is not a leaf?

    There is no public name for the hooks that `register_hook` adds.
    """
    return bool(x.retains_grad or x._backward_hooks)


def is_view(x: torch.Tensor) -> bool:
    """Does a tensor share the memory of the tensor that it was made from?"""
    return bool(x._is_view())


# Multiplies gradients in place and finds what is not finite, in one kernel: that of
# `torch.amp.GradScaler`, whose public methods need a torch optimizer.
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_

# Adam in one kernel. `torch.optim.Adam(fused=True)` keeps the moments itself, and adds
# epsilon in another place than Keras.
fused_adam = torch._fused_adam_

# Copies many tensors into others in one kernel. The public `copy_` takes only one.
copy_all = torch._foreach_copy_
