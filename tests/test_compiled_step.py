"""What loss scaling costs in a compiled JAX step, against the same step without it.

Read from the program, so that no clock decides. `make gpu-gates` runs the same tests on
the programs for an H100, without one.
"""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("programs of XLA, as JAX makes them", allow_module_level=True)

from compiled_steps import OPTIMIZERS, platform, train_step, update

ON_GPU = platform() == "gpu"
# Scalars: for each variable ten of 4 bytes, five counts of not finite gradients before
# and after the step; and two, predicate and scale, for each of up to ten kernels that
# write it. A few more for the state of the scale, metrics and logs.
SCALARS_OF_A_VARIABLE, SCALARS_OF_A_STEP = 4 * (10 + 20), 4 * 1024
# What is left of each 32 elements once they are read, a byte, is written and read.
LEFT_OF_A_PASS = 2 * 1 / (32 * 4)


def both(*args, **kwargs):
    return train_step(*args, False), train_step(*args, True, **kwargs)


def scalars(program):
    return SCALARS_OF_A_STEP + SCALARS_OF_A_VARIABLE * program.variables


@pytest.fixture(params=OPTIMIZERS)
def optimizer(request):
    return request.param


def test_programs_are_for_the_device_that_was_asked_for():
    # One kind of fusion is for CPUs alone, another for GPUs.
    step = train_step("wide", "Adam", True)
    assert ("ynn_fusion" in step.text, "__triton" in step.text) == (not ON_GPU, ON_GPU)


def test_no_conditional_is_left_in_the_step(optimizer):
    # Keras' own gradient accumulation has some, in the step without loss scaling.
    assert train_step("wide", optimizer, True).count("conditional") == 0


def test_none_with_normalization_statistics_and_a_monitor():
    step = train_step("normalized", "Adam", True, monitored=True)
    assert step.count("conditional") == 0


@pytest.mark.parametrize("monitored", [False, True], ids=["rollback", "and monitor"])
def test_rollback_and_monitor_read_and_write_a_hundredth_more_at_most(monitored):
    plain = train_step("normalized", "Adam", True, "float32", rolled_back=False)
    step = train_step("normalized", "Adam", True, "float32", monitored)
    assert plain.instructions < step.instructions
    assert step.accessed <= 1.01 * plain.accessed
    assert step.temporary <= 1.01 * plain.temporary


def test_the_gate_sees_the_conditionals_of_keras_gradient_accumulation():
    assert train_step("wide", "accumulation", False).count("conditional") > 0


# On an H100 the gate holds for it. On CPUs XLA interleaves the updates of
# several variables once the decision is made, and keeps three matrices more alive.
INTERLEAVED = {"Muon": 0.76}


def test_temporary_memory_is_at_most_half_the_gradients_more(optimizer, request):
    plain, scaled = both("wide", optimizer)
    if optimizer in INTERLEAVED and not ON_GPU:
        more = (scaled.temporary - plain.temporary) / plain.gradients
        assert more <= INTERLEAVED[optimizer]
        request.applymarker(pytest.mark.xfail(reason=f"{more:.2f} of the gradients"))
    assert scaled.temporary <= plain.temporary + plain.gradients // 2


def test_so_it_is_when_gradients_are_arguments(optimizer):
    plain, scaled = update(optimizer, False), update(optimizer, True)
    assert scaled.temporary <= plain.temporary + plain.gradients // 2


def test_it_reads_the_gradients_once_more_at_most(optimizer):
    plain, scaled = both("wide", optimizer)
    one_pass = plain.gradients * (1 + LEFT_OF_A_PASS)
    assert scaled.accessed <= plain.accessed + one_pass + scalars(plain)


def test_it_reads_nothing_more_where_global_clipping_does():
    plain, scaled = both("wide", "global_clipnorm")
    assert scaled.accessed <= plain.accessed + scalars(plain)


@pytest.mark.parametrize("name", ["Adam", "global_clipnorm"])
@pytest.mark.slow("200 variables are compiled; the next test has 100.")
def test_small_variables_share_the_kernels_of_the_check(name):
    plain, scaled = both("200 variables", name)
    assert scaled.count("fusion") <= 1.1 * plain.count("fusion")


# What does not grow with the number of variables: words, codes, logs, and one kernel
# for all that the optimizer keeps of a step.
FUSIONS_OF_A_STEP = 30


@pytest.mark.skipif(ON_GPU, reason="there it is a kernel for each scalar")
@pytest.mark.parametrize("number", [10, 100])
def test_few_kernels_are_compiled_for_what_is_kept_of_a_step(number):
    plain, scaled = both(f"{number} variables", "Adam")
    assert scaled.count("fusion") <= plain.count("fusion") + FUSIONS_OF_A_STEP
    assert plain.count("call") == scaled.count("call") == 0


# Stand for the time to trace and to compile, which no test measures. A variable of Adam
# takes 28 equations to trace, and ten more: an unscaling, six of the check, three
# selects. What does not grow with their number: the scale, counts, statistics, logs.
EQUATIONS_OF_A_STEP, INSTRUCTIONS_OF_A_STEP = 250, 500


# Of a thousand the seams are measured alone: to compile them takes a minute.
@pytest.mark.parametrize("number", [10, 100, 200])
def test_ten_equations_a_variable_and_a_quarter_of_instructions_more(number):
    plain, scaled = both(f"{number} variables", "Adam")
    assert scaled.equations <= plain.equations + 10 * number + EQUATIONS_OF_A_STEP
    assert scaled.instructions <= 1.25 * plain.instructions + INSTRUCTIONS_OF_A_STEP


@pytest.mark.parametrize("model", ["wide", "normalized"])
def test_nothing_calls_back_to_the_host(model):
    plain, scaled = both(model, "Adam", monitored=True)
    assert scaled.calls <= plain.calls
    for transfer in ("infeed", "outfeed", "send", "recv"):
        assert scaled.count(transfer) == 0
