"""`fully_shard`: weights spread over processes of torch, beside one process' own."""

import functools

import keras
import numpy as np
import processes
import pytest
from backends import BACKEND

import keras_mp

# They are started once for all tests of this file.
slow = pytest.mark.slow("Two processes, and four, each with torch and many trainings.")

ALONE = "optimizers,models,policies,told,interrupted"
ALL = "memory,skipping,skipping_in_fit,files"


@functools.cache
def run(ranks, names, folder=""):
    return processes.run(
        "sharded_by_torch.py", names, folder, processes=ranks, OMP_NUM_THREADS="1"
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    if BACKEND != "torch":
        pytest.skip("shards are torch's")
    return run(2, f"{ALONE},{ALL}", str(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module")
def four(tmp_path_factory, two):
    # After two: it resumes from the file that those have left.
    return run(4, f"policies,copies,{ALL}", str(tmp_path_factory.getbasetemp()))


@pytest.fixture(params=["two", "four"])
def results(request):
    return request.getfixturevalue(request.param)


@slow
def test_one_process_of_its_own_trains_as_without_shards_to_the_bit(two):
    (alone,) = run(1, "policies")
    for policy in ("mixed_float16", "mixed_bfloat16"):
        found = alone["policies"][policy]
        assert found["losses"] == found["weights"] == found["predictions"] == 0
        assert found["whole"] == []


# What half precision rounds differs with the order of sums, and Adam makes whole steps
# of it: so losses, not weights.
@pytest.mark.parametrize(
    ("policy", "losses"),
    [("mixed_float16", 1e-4), ("mixed_bfloat16", 2e-3), ("bfloat16", 5e-3)],
)
@slow
def test_several_processes_train_as_one_does(results, policy, losses):
    for found in results:
        trained = found["policies"][policy]
        assert trained["losses"] < losses
        assert trained["whole"] == []  # No process has all of a weight.


@slow
def test_copies_of_shards_hold_the_same_and_train_as_one_process_does(four):
    found = [result["copies"] for result in four]
    assert all(x["float32"]["weights"] < 2e-6 for x in found)
    assert all(x["bfloat16"]["losses"] < 5e-3 for x in found)
    for policy in ("float32", "bfloat16"):  # Rounded by chance, and alike.
        first, second, third, fourth = (x[policy]["kernel"] for x in found)
        assert (first, second) == (third, fourth) and first != second


@slow
def test_every_optimizer_trains_as_in_one_process(two):
    for found in two:
        for name, trained in found["optimizers"].items():
            assert trained["losses"] < 1e-6, name
            assert trained["weights"] < 2e-6, name


@slow
def test_every_kind_of_model_trains_as_in_one_process(two):
    for found in two:
        for name, trained in found["models"].items():
            is_half = "float16" in name
            assert trained["losses"] < (5e-4 if is_half else 1e-6), name
            assert trained["weights"] < (2e-3 if is_half else 1e-6), name
            # A number alone cannot be sharded.
            assert all("scale" in path for path in trained["whole"]), name


@slow
def test_a_process_holds_its_part_of_weights_gradients_and_slots(results):
    held = [found["memory"]["held"] for found in results]
    whole = results[0]["memory"]["whole"]
    assert sum(held) == whole
    # Rows are not cut: of 63 one process has one more than another.
    assert max(held) < 1.1 * whole / len(results)


@slow
def test_infinity_in_one_shard_alone_skips_the_step_in_all_processes(results):
    for found in results:
        first, bad, next_one = found["skipping"]
        assert (first["scale"], first["skipped"]) == (16384.0, 0)
        assert (bad["scale"], bad["skipped"]) == (8192.0, 1)
        assert bad["weights stay"] and bad["slots stay"]
        assert not next_one["weights stay"] and next_one["skipped"] == 1


@slow
def test_fit_forgets_a_step_that_one_process_makes_all_skip(results):
    for found in results:
        found = found["skipping_in_fit"]
        assert all(found["same"])  # To the bit: weights, statistics, slots.
        assert found["loss"][0] == found["loss"][1]
        assert found["skipped"] == [0, 2]


@slow
def test_a_file_resumes_on_another_number_of_processes(two, four):
    for results in (two, four):
        for found in results:
            found = found["files"]
            assert found["steps"] == 8
            assert found["reopened"] == 0  # One file, the whole weights.
            assert found["slots"].count(False) == 1  # The counts of loss scaling.
            assert found["losses"] == found["resharded"]
    first, later = two[0]["files"]["losses"], four[0]["files"]["losses"]
    np.testing.assert_allclose(first, later, rtol=2e-3)


@slow
def test_a_file_of_shards_opens_without_other_processes(four, tmp_path_factory):
    model = keras.models.load_model(tmp_path_factory.getbasetemp() / "whole_4.keras")
    assert model.layers[0].kernel.shape == (16, 63)
    assert {type(v.value).__name__ for v in model.weights} == {"Parameter"}


@slow
def test_a_pass_that_fails_changes_nothing_and_the_next_one_runs(two):
    for found in two:
        found = found["interrupted"]
        assert found["error"] and found["stays"] == 0
        assert found["losses"] < 1e-6


@slow
def test_bad_input_is_told_and_so_is_torchs_own_fully_shard(two):
    for found in two:
        told = found["told"]
        assert "`model` must not be sharded yet" in told["twice"]
        assert "`model` must be a keras.Model" in told["layer"]
        assert "`mesh` must be a DeviceMesh" in told["mesh"]
        assert "Received: mesh=(2,)" in told["mesh"]
        assert "`model` must be built" in told["unbuilt"]
        assert "Received: 'lora_kernel_a', which is not" in told["late"]
        # Once, though it was compiled twice; and what it says is so.
        (warning,) = told["theirs"]
        assert "torch's `fully_shard` does nothing for" in warning
        assert told["theirs sharded"] == [False]


def test_where_no_processes_know_each_other_it_says_so():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    names = "init_process_group" if BACKEND == "torch" else "ModelParallel"
    with pytest.raises(ValueError, match=names):
        keras_mp.fully_shard(model)
    assert model.predict(np.ones((1, 2)), verbose=0).shape == (1, 1)
