"""The private names of torch that keras_mp uses, each with the reason."""

import torch

# A tensor inside of torch.vmap must not leave it. `torch.func` has no such question.
is_inside_vmap = torch._C._functorch.is_functorch_wrapped_tensor

# Multiplies gradients in place and finds what is not finite, in one kernel: the one of
# `torch.amp.GradScaler`, whose public methods want an optimizer of torch's.
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_

# Adam in one kernel. `torch.optim.Adam(fused=True)` wants to hold the moments itself,
# and adds epsilon elsewhere than Keras.
fused_adam = torch._fused_adam_

# Copies tensors into others in one kernel. There is no public way to more than one.
copy_all = torch._foreach_copy_
