"""The suite `compiled`: how a program is read, and what is compiled."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("programs of JAX", allow_module_level=True)

import jax
import products

import keras_mp
from benchmarks.compiled import by_hand, steps, traced
from benchmarks.compiled.cases import CASES, Case
from benchmarks.compiled.compiled_tables import tables
from benchmarks.compiled.devices import DEVICES
from benchmarks.compiled.roofline import cost_of
from benchmarks.compiled.suite import SUITE
from benchmarks.models import dense

PROGRAM = """HloModule step

%body (state: (s32[], f16[64,64])) -> (s32[], f16[64,64]) {
  %state = (s32[], f16[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f16[64,64]{1,0} get-tuple-element(%state), index=1
  %square = f16[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %next = (s32[], f16[64,64]{1,0}) tuple(%i, %square)
}

%rows (table: f32[1000,64], ids: s32[8]) -> f32[8,64] {
  %table = f32[1000,64]{1,0} parameter(0)
  %ids = s32[8]{0} parameter(1)
  %twice = f32[1000,64]{1,0} add(%table, %table)
  ROOT %taken = f32[8,64]{1,0} gather(%twice, %ids), slice_sizes={1,64}
}

%part (whole: f32[16,8]) -> f16[16,2] {
  %whole = f32[16,8]{1,0} parameter(0)
  %half = f16[16,8]{1,0} convert(%whole)
  ROOT %slice = f16[16,2]{1,0} slice(%half), slice={[0:16], [0:2]}
}

%update (whole: f16[4,16,8], part: f16[1,16,8], i: s32[]) -> f16[4,16,8] {
  %whole = f16[4,16,8]{2,1,0} parameter(0)
  %part = f16[1,16,8]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %updated = f16[4,16,8]{2,1,0} dynamic-update-slice(%whole, %part, %i, %i, %i)
}

ENTRY %main (a: f32[32,16], b: f32[16,8], table: f32[1000,64], ids: s32[8]) -> f32[8,64] {
  %a = f32[32,16]{1,0} parameter(0)
  %b = f32[16,8]{1,0} parameter(1)
  %table = f32[1000,64]{1,0} parameter(2)
  %ids = s32[8]{0} parameter(3)
  %product = f32[32,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %part.1 = f16[16,2]{1,0} fusion(%b), kind=kLoop, calls=%part
  %start = (s32[], f16[64,64]{1,0}) tuple(%ids, %a)
  %loop = (s32[], f16[64,64]{1,0}) while(%start), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %memory = f16[1000,1000]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %chunk = f16[1,16,8]{2,1,0} copy(%b)
  %slopes = f16[4,16,8]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %i = s32[] constant(1)
  %update.1 = f16[4,16,8]{2,1,0} fusion(%slopes, %chunk, %i), kind=kLoop, calls=%update
  ROOT %rows.1 = f32[8,64]{1,0} fusion(%table, %ids), kind=kLoop, calls=%rows
}
"""  # noqa: E501


def test_a_program_is_read_kernel_by_kernel():
    device = DEVICES["H100"]._replace(bandwidth=1.0, peak={False: 1.0, True: 1e30})
    cost = cost_of(PROGRAM, device)
    operations = [(p.operations, p.operands) for p in cost.products]
    half = (2 * 64**3, ("f16", "f16"))
    assert operations == [(2 * 32 * 8 * 16, ("f32", "f32")), half]
    moved = 4 * (32 * 16 + 16 * 8 + 32 * 8)  # The first product waits for memory.
    gathered = 4 * (8 * 64 + 8 + 8 * 64)  # Of twice the table only what is taken.
    moved += 4 * 16 * 2 + 2 * 16 * 2  # Of a matrix only what is sliced.
    moved += 4 * 16 * 8 + 2 * 16 * 8  # A copy of the matrix in half precision,
    moved += 2 * 16 * 8 + 4 + 2 * 16 * 8  # which is written into a larger one.
    assert cost.seconds == pytest.approx(5 * half[0] + moved + gathered, abs=0.5)
    assert cost.launches == 5 + 5
    # The products in half precision take longer than to read x and to write its square.
    assert cost.hidden == pytest.approx(5 * 2 * 2 * 64**2, rel=1e-6)


def test_a_convolution_has_as_many_operations_as_its_gradients():
    call = (
        "ENTRY %main (x: f16[8,32,32,3], k: f16[16,5,5,3]) -> f16[8,32,32,16] {{\n"
        "  %x = f16[8,32,32,{i}]{{3,2,1,0}} parameter(0)\n"
        "  %k = {kernel} parameter(1)\n"
        "  %y = ({result}, u8[0]{{0}}) custom-call(%x, %k), dim_labels=b01f_o01i->b01f,"
        ' custom_call_target="__cudnn$conv{name}"\n}}\n'
    )
    image, kernel = "f16[8,32,32,3]{3,2,1,0}", "f16[16,5,5,3]{3,2,1,0}"
    output = "f16[8,32,32,16]{3,2,1,0}"
    forms = {
        "Forward": (3, kernel, output),
        "BackwardInput": (16, kernel, image),
        "BackwardFilter": (3, output, kernel),
    }
    for name, (i, operand, result) in forms.items():
        text = call.format(i=i, kernel=operand, result=result, name=name)
        (product,) = cost_of(text, DEVICES["H100"]).products
        assert product.operations == 2 * 8 * 32 * 32 * 16 * 5 * 5 * 3, name


def test_a_loop_of_unknown_length_is_an_error():
    text = PROGRAM.replace('"known_trip_count":{"n":"5"}', "")
    with pytest.raises(ValueError, match="a loop of unknown length: loop"):
        cost_of(text, DEVICES["H100"])


def test_the_step_by_hand_has_products_in_half_precision():
    case = CASES["decoder"]._replace(depth=1)
    function, arguments = by_hand.step(case, DEVICES["TPU v5e"])
    found = products.counted(
        products._of_jaxpr(jax.make_jaxpr(function)(*arguments).jaxpr)
    )
    # But that of JAX's attention, whose logits are float32.
    assert found.total() == 3 * 9 and found["float32"] == 0
    loss, _ = jax.eval_shape(function, *arguments)
    assert loss.dtype == "float32"


@pytest.mark.parametrize("way", ["float32", "Keras", "keras_mp"])
def test_the_step_of_keras_is_keras_own(way):
    ends = (8,), "float32"
    case = Case("", lambda: dense(8, 4), 2, inputs=ends, target=ends)
    _, arguments = traced.by_jax(*steps._model(case, DEVICES["H100"], way))
    installed = hasattr(keras.layers.Layer.__call__, "_keras_mp_original")
    keras_mp.install()
    assert installed == (way == "keras_mp")
    state, (x, y) = arguments
    assert len(state[0]) == 8 and x.shape == y.shape == (2, 8)


def test_what_cannot_be_compiled_here_is_measured_only_where_it_is_named():
    missing = {name for name, d in DEVICES.items() if not d.is_possible}
    assert missing <= {name.partition(":")[0] for name in SUITE.slow}
    assert set(SUITE.in_short) <= set(SUITE.values("case"))


def test_speed_and_memory_stand_beside_those_of_float32():
    sizes = {"float32": (2e-3, 4e9), "keras_mp": (1e-3, 3e9)}
    about = {"case": "H100: MLP", "backend": "jax"}
    records = [
        about | {"way": way, "seconds": seconds, "peak": peak}
        for way, (seconds, peak) in sizes.items()
    ]
    records.append(about | {"way": "Keras", "failure": "too large"})
    other = about | {"backend": "tensorflow", "way": "float32"}
    records.append(other | {"seconds": 4e-3, "peak": 4e9})
    table, of_tensorflow = tables(records)
    assert of_tensorflow.rows == [(CASES["MLP"].title, "4.00 ms, 4.00 GB")]
    assert table.rows == [
        (CASES["MLP"].title, "2.00 ms, 4.00 GB", "failed", "2.00 in 0.75")
    ]
    assert list(table.notes) == ["H100: MLP, Keras: too large"]
    assert "not measured" in tables(records, whole=True)[0].markdown()
    # What no row has is no column.
    assert table.columns == ("", "float32", "Keras' mixed_float16", "keras_mp")
