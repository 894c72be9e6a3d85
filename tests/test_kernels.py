"""What torch runs in a step, beside `torch.amp`: kernels, bytes, waits, memory."""

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("counts what torch runs", allow_module_level=True)

import torch

from benchmarks.kernels import counting, steps
from benchmarks.kernels.kernels_tables import (
    AMP,
    CONVOLUTIONS,
    DECODER,
    LOGITS,
    OURS,
    SUBCLASSED,
    tables,
)

# Smaller than in the suite: a float16 product on a CPU takes its time.
SMALL = {
    DECODER: {"vocabulary": 512, "length": 32, "width": 64, "depth": 4, "heads": 4},
    LOGITS: {"vocabulary": 65536, "length": 128, "width": 8, "depth": 1, "heads": 1},
}


@pytest.fixture(scope="module")
def counts():
    found = {}
    for name, case in steps.CASES.items():
        case = case._replace(sizes=SMALL.get(name, case.sizes))
        for way in (AMP, OURS):
            found[name, way] = steps.count_step(case, way)
    return found


@pytest.mark.parametrize(
    ("case", "most"), [(DECODER, 1.25), (CONVOLUTIONS, 1.65), (SUBCLASSED, 1.65)]
)
@pytest.mark.kernels
def test_a_step_has_hardly_more_kernels_than_torch_amp(counts, case, most):
    ours, amp = counts[case, OURS], counts[case, AMP]
    assert ours.kernels <= most * amp.kernels
    assert ours.bytes <= 1.2 * amp.bytes
    assert ours.waits == 1


@pytest.mark.parametrize("case", [DECODER, SUBCLASSED])
@pytest.mark.kernels
def test_a_step_takes_no_more_memory_than_torch_amp(counts, case):
    # A model with a graph keeps all that it computes until its call is over.
    assert counts[case, OURS].peak <= 1.1 * counts[case, AMP].peak


@pytest.mark.kernels
def test_of_large_logits_it_takes_half_as_much(counts):
    ours, amp = counts[LOGITS, OURS], counts[LOGITS, AMP]
    assert ours.peak <= 0.55 * amp.peak
    assert ours.bytes <= 1.2 * amp.bytes
    assert ours.waits == 1


def test_a_copy_from_the_host_is_a_wait():
    x = torch.ones(4)
    assert counting.count(lambda: x + 1, [x]).waits == 0  # An argument of the kernel.
    assert counting.count(lambda: x + torch.as_tensor(1.0), [x]).waits == 1
    assert counting.count(lambda: x + torch.full((), 1.0), [x]).waits == 0


def test_what_is_counted():
    a, b = torch.ones((4, 8)), torch.ones((8, 2))

    def step():
        view = (a @ b).T  # A product, and a view.
        return float(view.sum())  # A sum, and a wait.

    found = counting.count(step, [a])
    assert found.kernels == 2
    product, number = 4 * 4 * 2, 4
    assert found.bytes == a.nbytes + b.nbytes + product + product + number
    assert found.waits == 1
    assert found.peak == a.nbytes + product + number


def test_memory_that_is_free_again_is_not_counted():
    x = torch.ones(1024)

    def step():
        y = x
        for _ in range(5):
            y = y + 1

    assert counting.count(step, []).peak == 2 * x.nbytes


def test_the_table_compares_with_torch_amp():
    whole = {"kernels": 100, "bytes": 2_000_000, "peak": 3_000_000, "waits": 0}
    more = {"kernels": 150, "bytes": 2_200_000, "peak": 3_000_000, "waits": 1}
    records = [
        {"case": DECODER, "way": AMP, **whole},
        {"case": DECODER, "way": OURS, **more},
    ]
    (table,) = tables(records, whole=True)
    text = table.markdown()
    assert "| torch.amp | 100 | 2.0 MB | 3.0 MB | 0 |" in text
    assert "| keras_mp | 150 (1.50) | 2.2 MB (1.10) | 3.0 MB (1.00) | 1 |" in text
    assert text.count("not measured") == 3
