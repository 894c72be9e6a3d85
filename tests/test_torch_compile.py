"""torch.compile on a step of the user's: no more breaks and graphs than Keras' has."""

import concurrent.futures

import numpy as np
import pytest
from backends import BACKEND
from processes import run

if BACKEND != "torch":
    pytest.skip("torch.compile is torch's", allow_module_level=True)

pytestmark = pytest.mark.slow("torch compiles whole steps, under two policies.")


@pytest.fixture(scope="module")
def found():
    """What the script has found under each policy; one after the other takes twice."""
    policies = "float32", "mixed_float16"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(run, "compiled_by_torch.py", policy) for policy in policies]
        return {p: r.result()[0] for p, r in zip(policies, runs, strict=True)}


@pytest.mark.parametrize("what", ["breaks", "graphs"])
def test_a_step_has_no_more_of_them_than_one_of_keras_in_float32(found, what):
    assert 0 < found["mixed_float16"][what] <= found["float32"][what]


def test_it_learns_what_it_learns_eagerly_and_what_float32_does(found):
    ours, wide = found["mixed_float16"], found["float32"]
    np.testing.assert_allclose(ours["compiled"], ours["eager"], rtol=1e-3)
    np.testing.assert_allclose(ours["compiled"][:3], wide["compiled"], rtol=1e-3)
    assert ours["compiled"][3] < ours["compiled"][0]


def test_a_skipped_step_leaves_no_trace(found):
    ours = found["mixed_float16"]
    for name in ("compiled", "eager"):
        assert ours[f"{name}, no trace"] and ours[f"{name}, skipped"] == 1
