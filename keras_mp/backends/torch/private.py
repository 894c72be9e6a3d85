"""The private names of torch that keras_mp uses, each with the reason."""

import torch

# A tensor inside of `torch.vmap` must not leave it, and a function of ours with a
# derivative of its own is none that `torch.func` knows. It has no such question.
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def is_watched(x: torch.Tensor) -> bool:
    """Does somebody want the gradient of a tensor that is no leaf?

    There is no public name for the hooks that `register_hook` has noted.
    """
    return bool(x.retains_grad or x._backward_hooks)


def is_view(x: torch.Tensor) -> bool:
    """Does a tensor share the memory of another one that it was made from?"""
    return bool(x._is_view())


# Multiplies gradients in place and finds what is not finite, in one kernel: the one of
# `torch.amp.GradScaler`, whose public methods want an optimizer of torch's.
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_

# Adam in one kernel. `torch.optim.Adam(fused=True)` wants to hold the moments itself,
# and adds epsilon elsewhere than Keras.
fused_adam = torch._fused_adam_

# Copies tensors into others in one kernel. There is no public way to more than one.
copy_all = torch._foreach_copy_
