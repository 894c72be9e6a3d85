"""Functions that are one equation each, and small calls in programs for CPUs alone."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("programs of XLA, as JAX makes them", allow_module_level=True)

import jax
import jax.export
import jax.numpy as jnp

from keras_mp.backends import engine
from keras_mp.backends.jax.equations import equation

TOLD = "xla_cpu_small_call"
MANY = np.linspace(0, 1, 100_000, dtype="float32")


@engine.compiled(lambda x: x)
def circle(x):
    return jnp.sin(x) ** 2 + jnp.cos(x) ** 2


@engine.compiled(lambda x: (x, x))
def powers(x):
    return x * x, x * x * x


@engine.compiled(lambda x, y: (x, y))
def sums(x, y):
    return x + y.sum(), y + x[0]


@engine.compiled(lambda x, y, *_: (y, x), static=(2,))
def swapped(x, y, unread, also_unread):
    return y, x + 1


@equation(lambda xs: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "int32"), xs))
def signs(xs):
    return jax.tree.map(lambda x: jnp.sign(x).astype("int32"), xs)


def lowered(function, *args, platforms=("cpu",)):
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=platforms)


@pytest.mark.parametrize("function", [circle, powers])
@pytest.mark.parametrize("x", [np.float32(0.5), MANY[:5000]], ids=["one", "few"])
def test_what_has_small_results_is_called(function, x):
    program = lowered(function, x)
    assert TOLD in program.as_text()
    assert "to_apply" in program.compile().as_text()


@pytest.mark.parametrize("number", [1, 2, 17, 1000, 8000])
def test_a_flag_of_codes_is_in_a_call_what_it_is_outside(number):
    finite = np.zeros(number, "int8")
    flag = engine.compiled(lambda codes: jax.ShapeDtypeStruct((), "bool"))
    called = lowered(flag(engine.all_finite), finite)
    assert TOLD in called.as_text()
    places = {0, number // 3, number // 2, number - 1}
    for run in (called.compile(), jax.jit(engine.all_finite)):
        assert run(finite)
        for place in places:
            for code in (1, 2):
                one = finite.copy()
                one[place] = code
                assert not run(one)


LARGE = {
    "one": (circle, [MANY]),
    "several": (powers, [MANY]),
    "one of them": (sums, [MANY[:100], MANY]),
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


def test_each_is_one_equation():
    def several(x):
        return circle(x), powers(x), signs([x, None, x])

    found = jax.make_jaxpr(several)(1.0).jaxpr.eqns
    assert [eqn.params["name"] for eqn in found] == ["circle", "powers", "signs"]


def test_what_is_not_read_is_not_handed_to_a_call():
    # XLA would end the process.
    program = lowered(lambda *args: swapped(*args[:2], None, args[2]), 1.0, 2.0, 3.0)
    assert TOLD in program.as_text()
    assert program.compile()(1.0, 2.0, 3.0) == (2.0, 2.0)


def test_no_other_call_is_taken_for_ours():
    @jax.jit
    def theirs(x):
        return jnp.cumsum(x)[-1]

    def outer(x):
        y = theirs(x)
        return swapped(x[0], y, None, y), y

    text = lowered(outer, MANY[:100]).as_text()
    (line,) = [line for line in text.splitlines() if TOLD in line]
    assert "@swapped" in line


def test_structures_dtypes_and_vmap_of_an_equation():
    x = jnp.array([-2.0, 0, 3])
    want = [[-1, 0, 1]] * 2
    for run in (signs, jax.jit(signs), jax.vmap(signs), jax.jit(jax.vmap(signs))):
        found = jax.tree.leaves(run([x, None, x]))
        assert [f.tolist() for f in found] == want
        assert {str(f.dtype) for f in found} == {"int32"}


def test_integers_in_an_equation_have_no_derivative():
    def function(x):
        (sign,) = signs([x])
        return x * sign

    for derivative in (jax.grad, jax.jacfwd):
        assert derivative(function)(-2.0) == -1
        assert jax.jit(derivative(function))(-2.0) == -1


def test_types_that_say_how_they_are_sharded_are_kept():
    axis = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((1,), ("x",), axis_types=(axis,))
    spec = jax.sharding.PartitionSpec("x")
    x = jax.device_put(MANY[:8], jax.sharding.NamedSharding(mesh, spec))
    shape = jax.eval_shape(lambda x: powers(x)[0], x)
    assert shape.sharding.spec == spec
    np.testing.assert_allclose(jax.jit(powers)(x)[1], MANY[:8] ** 3, rtol=1e-6)


def test_what_numpy_holds_in_float64_is_what_jax_makes_of_it():
    def products(grads, scale):
        return engine.unscale(grads, scale)

    want = products([jnp.ones(3), None], 0.5)[0]
    assert want.dtype == "float32"
    (found, _) = jax.jit(lambda scale: products([np.ones(3), None], scale))(0.5)
    assert found.dtype == want.dtype
    np.testing.assert_array_equal(found, want)


def test_sizes_that_are_not_known_yet_are_exported():
    (size,) = jax.export.symbolic_shape("size")
    unknown = jax.ShapeDtypeStruct((size,), "float32")
    exported = jax.export.export(jax.jit(powers), platforms=["cpu"])(unknown)
    assert exported.call(2 * jnp.ones(3))[1].tolist() == [8, 8, 8]
