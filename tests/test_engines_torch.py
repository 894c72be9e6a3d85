"""In several processes of torch: one skips, all skip, and all go on alike."""

import functools
import json

import keras
import processes
import pytest
from backends import BACKEND
from step_sequences import SEQUENCES

if BACKEND != "torch":
    pytest.skip("engines of torch", allow_module_level=True)


@functools.cache
def run(command):
    return processes.run("engine_torch.py", command, processes=2, OMP_NUM_THREADS="1")


def test_every_sequence_of_steps_follows_the_oracle_to_the_bit():
    expected = json.loads(json.dumps({n: s.expected() for n, s in SEQUENCES.items()}))
    for result in run("loop"):
        for how in ("reduced", "local"):
            for name, trace in expected.items():
                assert result[how][name] == trace, (how, name)


@pytest.mark.parametrize(
    "how", ["parallel", "fit"], ids=["DistributedDataParallel", "fit"]
)
@pytest.mark.slow("Several devices or processes; one such test stays in `make test`.")
def test_training_forgets_a_step_that_one_process_makes_all_skip(how):
    first, last = (result[how] for result in run("train"))
    for result in (first, last):
        clean = result["clean"]
        assert (clean["scale"], clean["skipped"]) == (128.0, 0)
        for where in ("first", "last"):
            training = result[where]
            # To the bit: weights, slots, iterations; in fit, statistics and metrics.
            assert training["values"] == clean["values"]
            # One overflow halved the scale, one broken batch did not.
            assert (training["scale"], training["skipped"]) == (128.0, 2)
            assert (training["consecutive"], training["nonfinite"]) == (0, 6)
    assert first == last


def test_processes_send_one_flag_a_step_and_more_only_after_an_overflow(monkeypatch):
    import numpy as np
    import torch

    import keras_mp

    sent = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda x, op: sent.append(tuple(x.shape))
    )
    variables = [keras.Variable(np.ones(3, "float32")) for _ in range(5)]
    optimizer = keras_mp.LossScaleOptimizer("adam")
    optimizer.build(variables)
    for value, messages in ((1.0, [()]), (np.inf, [(), (7,)])):
        optimizer.scale_loss(1.0)
        with torch.no_grad():
            optimizer.apply([torch.full((3,), value) for _ in variables], variables)
        assert sent == messages  # Codes: of five gradients, a norm and a loss.
        sent.clear()
    assert int(optimizer.skipped_steps) == 1
