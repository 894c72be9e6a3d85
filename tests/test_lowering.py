"""Every layer of Keras in half precision, made for devices that are not there.

`make gpu-gates` and `make tpu-gates` compile what is lowered here.
"""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("JAX lowers for other devices", allow_module_level=True)

import jax
from compiled_steps import platform, sharding
from test_every_layer import NOT_COMPILED

import keras_mp
from sweeps.layer_cases import cases
from sweeps.layer_errors import built
from sweeps.layer_gradients import jax_program

FLOAT16, BFLOAT16 = keras_mp.MixedFloat16(), keras_mp.MixedBFloat16()
# Without the GPU XLA takes tiles of Triton's that do not fit a product, in float32 too.
OPTIONS = {"gpu": {"xla_gpu_enable_triton_gemm": False}}
# One case of each class.
ALL = {
    case.cls: case for case in reversed(cases("jax")) if case.cls not in NOT_COMPILED
}
# Keras makes these of TensorFlow, which the gates do without.
OF_TENSORFLOW = (
    "Hashing",
    "HashedCrossing",
    "IntegerLookup",
    "JaxLayer",
    "StringLookup",
    "TextVectorization",
)


def traced(case, policy):
    layer = built(case, policy)
    run, values = jax_program(layer, case.inputs(), dict(case.options()), case.gradient)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding()), values
    )
    return jax.jit(run).trace(*shapes)


@pytest.mark.filterwarnings("ignore")  # What layers say of hard inputs is not ours.
@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow(
    "JAX lowers what test_every_layer.py runs; the nightly gates compile it."
)
def test_a_layer_and_its_gradient_are_lowered(name):
    if name in OF_TENSORFLOW:
        pytest.importorskip("tensorflow")
    keras_mp.install()  # The policies were made before, and the gates have no conftest.
    for policy, platforms in ((FLOAT16, ["cuda"]), (BFLOAT16, ["cuda", "tpu"])):
        program = traced(ALL[name], policy)
        for each in platforms if sharding() is None else []:
            assert program.lower(lowering_platforms=(each,)).as_text()
        if sharding() is not None:
            program.lower().compile(OPTIONS.get(platform()))
