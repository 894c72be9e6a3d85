"""What JAX calls as a whole, in programs for CPUs and for nothing else."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("programs of XLA, as JAX makes them", allow_module_level=True)

import jax
import jax.numpy as jnp

from keras_mp.backend import engine

TOLD = "xla_cpu_small_call"
MANY = np.linspace(0, 1, 100_000, dtype="float32")


@engine.compiled
def circle(x):
    return jnp.sin(x) ** 2 + jnp.cos(x) ** 2


@engine.compiled
def powers(x):
    return x * x, x * x * x


@engine.compiled
def rows(x, y):
    return x[:, None] + y, x * 2


def lowered(function, *args, platforms=("cpu",)):
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=platforms)


@pytest.mark.parametrize("function", [circle, powers])
@pytest.mark.parametrize("x", [np.float32(0.5), MANY[:5000]], ids=["one", "few"])
def test_what_has_small_results_is_called(function, x):
    program = lowered(function, x)
    assert TOLD in program.as_text()
    assert "to_apply" in program.compile().as_text()


LARGE = {
    "one": (circle, [MANY]),
    "several": (powers, [MANY]),
    "one of them": (rows, [MANY[:100], MANY[:1000]]),
    "vmap": (jax.vmap(circle), [MANY]),
    "jvp": (lambda x: jax.jvp(circle, (x,), (x,)), [MANY]),
}


@pytest.mark.parametrize(("function", "args"), LARGE.values(), ids=LARGE)
def test_what_has_large_ones_is_not(function, args):
    # XLA would divide them among threads, and may refuse to compile the call.
    program = lowered(function, *args)
    assert TOLD not in program.as_text()
    for found, right in zip(
        jax.tree.leaves(program.compile()(*args)),
        jax.tree.leaves(function(*args)),
        strict=True,
    ):
        np.testing.assert_allclose(found, right, rtol=1e-6)


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_nothing_is_called_where_it_is_compiled_for_another_device(platforms):
    # Whatever the default of this process is.
    assert TOLD not in lowered(powers, 0.5, platforms=platforms).as_text()


def test_outside_of_a_program_it_is_the_function_itself():
    assert circle(0.5) == pytest.approx(1)
    assert jax.vmap(powers)(jnp.ones(3))[1].tolist() == [1, 1, 1]
    with jax.disable_jit():
        assert jax.jit(circle)(0.5) == pytest.approx(1)


def test_a_call_is_differentiated_forwards_and_backwards():
    cube = jax.jit(lambda x: powers(x)[0] * x)
    for derivative in (jax.grad, jax.jacfwd, jax.jacrev):
        assert jax.jit(derivative(cube))(2.0) == 12
    assert jax.jit(jax.grad(jax.grad(cube)))(2.0) == 12
    assert jax.jit(jax.grad(jax.checkpoint(cube)))(2.0) == 12
