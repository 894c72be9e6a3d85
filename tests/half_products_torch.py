"""torch's product of half-precision operands with a float32 result, on CPUs.

They have no kernel for it: here is one, which multiplies in float32.
"""

import pytest
import torch

from keras_mp.backends.torch import products

if not hasattr(torch.ops.aten.mm, "dtype"):
    pytest.skip("torch has such products since 2.8", allow_module_level=True)


def _mm(a, b, out_dtype):
    assert a.dtype == b.dtype in (torch.float16, torch.bfloat16)
    return torch.mm(a.float(), b.float()).to(out_dtype)


_library = torch.library.Library("aten", "IMPL")
_library.impl("mm.dtype", _mm, "CPU")


def use_kernel(monkeypatch):
    monkeypatch.setattr(products, "DEVICES", ("cpu",))
