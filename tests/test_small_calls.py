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


def lowered(function, *args, **kwargs):
    return jax.jit(function).trace(*args).lower(**kwargs)


@pytest.mark.parametrize("function", [circle, powers])
def test_a_scalar_or_several_results_are_called(function):
    program = lowered(function, 0.5)
    assert TOLD in program.as_text()
    assert "to_apply" in program.compile().as_text()


@pytest.mark.parametrize(
    ("function", "x"), [(circle, MANY), (jax.vmap(circle), MANY)], ids=["many", "vmap"]
)
def test_a_result_of_many_elements_is_not(function, x):
    # XLA would divide it among threads, and refuse to compile the call.
    program = lowered(function, x)
    assert TOLD not in program.as_text()
    np.testing.assert_allclose(program.compile()(x), np.ones_like(x), rtol=1e-6)


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_nothing_is_where_it_is_compiled_for_another_device(platforms):
    # Whatever the default of this process is.
    assert TOLD not in lowered(powers, 0.5, lowering_platforms=platforms).as_text()


def test_nor_outside_of_a_program():
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
