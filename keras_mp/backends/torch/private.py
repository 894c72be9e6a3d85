"""The private names of torch that keras_mp uses, each with the reason."""

import torch

# A tensor inside of torch.vmap must not leave it. `torch.func` has no such question.
is_inside_vmap = torch._C._functorch.is_functorch_wrapped_tensor
