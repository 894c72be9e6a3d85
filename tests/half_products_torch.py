"""torch's product of half-precision operands with a float32 result, on CPUs.

They have no kernel for it: here is one, which multiplies in float32.
"""

import pytest
import torch

from benchmarks.kernels.private import give_cpus_half_products
from keras_mp.kernels.torch import products

if not hasattr(torch.ops.aten.mm, "dtype"):
    pytest.skip("torch has such products since 2.8", allow_module_level=True)


give_cpus_half_products()


def use_kernel(monkeypatch):
    monkeypatch.setattr(products, "DEVICES", ("cpu",))
