"""`inspect`: what is shown of every layer, and what is warned of, where it is true."""

import functools
import json
import re

import keras
import numpy as np
import pytest
from backends import BACKEND, Chained, same_bits, values

import keras_mp
from keras_mp.policies.weights import LARGE

layers, ops = keras.layers, keras.ops
MIXED, BRAIN = "mixed_float16", "mixed_bfloat16"


def graph(*stack, shape=(16,), dtype="float32", policy="mixed_float16"):
    """A Sequential model of what `stack` makes under a policy."""
    with keras_mp.policy_scope(policy):
        made = [make() for make in stack]
        return keras.Sequential([keras.Input(shape, dtype=dtype), *made], name="model")


def stock(*stack, **kwargs):
    """As `graph`, under Keras' own mixed_float16, which keeps nothing in float32."""
    return graph(*stack, policy=keras.DTypePolicy("mixed_float16"), **kwargs)


def sequential(*made):
    return keras.Sequential([keras.Input((16,)), *made])


def functional(call, *shape):
    """A model of what `call` makes of an input, under mixed_float16."""
    with keras_mp.policy_scope("mixed_float16"):
        x = keras.Input(shape)
        return keras.Model(x, call(x))


def with_an_attention(size):
    attend = layers.MultiHeadAttention
    return functional(lambda x: attend(2, size, name="a")(x, x), 6, 16)


def rows(model):
    return {row.path.split("/")[-1]: row for row in keras_mp.inspect(model).layers}


def warnings_with(model, word):
    """The warnings in which a word stands."""
    return [w for w in keras_mp.inspect(model).warnings if word in str(w)]


# What is shown --------------------------------------------------------------------


def test_every_layer_is_shown_with_what_it_computes_in_and_the_rule_that_decided():
    model = graph(
        lambda: layers.Dense(8, name="hidden"),
        lambda: layers.Dense(8, dtype="float32", name="mine"),
        lambda: layers.Dense(8, activation="softmax", name="probabilities"),
    )
    shown = [
        (name, row.class_name, row.decided_by)
        + (row.compute_dtype, row.variable_dtype, row.output_dtype)
        for name, row in rows(model).items()
    ]
    assert shown == [
        ("hidden", "Dense", "policy", "float16", "float32", "float16"),
        ("mine", "Dense", "its own dtype", *["float32"] * 3),
        ("probabilities", "Dense", "softmax", *["float32"] * 3),
    ]


@pytest.mark.parametrize("units", [LARGE // 256, LARGE // 512])
@pytest.mark.kernels
def test_a_large_head_is_said_to_multiply_in_half_precision(units):
    model = graph(lambda: layers.Dense(256), lambda: layers.Dense(units, name="head"))
    model.compile("sgd", "mse")
    found = keras_mp.inspect(model)
    row, text = found.layers[-1], " ".join(str(found).split())
    half, copies = row.products, row.half_copy_bytes
    if units * 256 < LARGE:
        assert (half, copies, row.decided_by) == (None, 0, "output layer")
        assert "what the loss sees is not rounded" not in text
    else:
        # The bias is added in float32.
        assert (half, copies, row.compute_dtype) == ("float16", 2 * LARGE, "float32")
        assert "output layer; products in float16, results in float32" in row.decided_by
        assert "what the loss sees is not rounded" in text


def test_without_kernels_nothing_is_said_of_them():
    keras_mp.install(kernels=False)
    keras_mp.set_global_policy("mixed_float16")
    model = with_large_logits()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    found = keras_mp.inspect(model)
    assert found.layers[-1].products is None
    assert found.layers[-1].decided_by == "output layer" and not found.losses


def with_large_logits(activation=None):
    ids = keras.Input((1024,), dtype="int32")
    x = layers.Embedding(LARGE // 32, 32)(ids)
    return keras.Model(ids, layers.Dense(LARGE // 32, activation, name="head")(x))


@pytest.mark.parametrize(
    ("metrics", "recompute", "sentence"),
    [
        ([], False, "head and loss in 8 chunks: logits would take 1.1 GB"),
        (["accuracy"], False, "head and loss in 8 chunks: logits would take 1.1 GB"),
        (
            ["sparse_top_k_categorical_accuracy"],
            False,
            "logits take 1.1 GB as a whole, for the metrics;",
        ),
        (["accuracy"], True, "(1.1 GB) are computed again in the backward pass"),
    ],
)
@pytest.mark.kernels
def test_how_the_loss_reads_large_logits_is_said(metrics, recompute, sentence):
    keras_mp.set_global_policy(keras_mp.MixedFloat16(recompute_logits=recompute))
    model = with_large_logits("softmax")
    model.compile("sgd", "mse", metrics=metrics)
    assert not keras_mp.inspect(model).losses
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=metrics)
    found = keras_mp.inspect(model)
    if BACKEND == "tensorflow":
        sentence = sentence.replace("chunks:", "chunks where XLA compiles for a GPU:")
        if recompute:
            sentence = "logits take 1.1 GB as a whole: only JAX computes them again;"
    if BACKEND != "torch":
        assert sentence in " ".join(str(found).split())
    else:
        assert not found.losses


@pytest.mark.skipif(BACKEND != "torch", reason="there it is the gradient alone")
@pytest.mark.kernels
def test_in_how_many_chunks_the_gradient_of_logits_is_computed_is_said():
    keras_mp.set_global_policy("mixed_float16")
    model = with_large_logits()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["sparse_top_k_categorical_accuracy"])
    (sentence,) = keras_mp.inspect(model).losses
    assert sentence == (
        "head: head and loss are differentiated in 16 chunks on NVIDIA's GPUs: the "
        "gradient of the logits would take 1.1 GB (batches of 32)."
    )


def test_a_layer_that_was_never_called_is_undecided_and_its_weights_are_not_known():
    model = keras.Sequential([layers.Dense(8, dtype=keras_mp.MixedFloat16())])
    (row,) = keras_mp.inspect(model).layers
    assert row.decided_by == "its first call will"
    assert (row.weight_bytes, row.output_bytes, row.output_dtype) == (None,) * 3
    assert "?" in str(keras_mp.inspect(model))


def test_layers_under_the_global_policy_of_keras_are_said_to_be():
    row = rows(sequential(layers.Dense(2, name="d")))["d"]
    assert (row.compute_dtype, row.decided_by) == ("float32", "global policy")


def test_a_quantized_layer_is_said_to_be():
    model = graph(lambda: layers.Dense(8, name="d"), policy="float32")
    model.layers[0].quantize("int8")
    row = rows(model)["d"]
    assert row.decided_by == "quantized"
    # 16 x 8 integers, 8 biases and 8 scales.
    assert row.weight_bytes == 16 * 8 + 4 * (8 + 8)


def test_the_parts_of_layers_and_the_layers_of_nested_models_are_shown_below_them():
    with keras_mp.policy_scope("mixed_float16"):
        both = layers.Bidirectional(layers.LSTM(8, name="l"), name="b")
        inner = keras.Sequential([keras.Input((6, 16)), both], name="inner")
        model = keras.Sequential([keras.Input((6, 16)), inner, layers.Dense(2)])
    paths = [row.path for row in keras_mp.inspect(model).layers]
    assert paths[:3] == ["inner", "inner/b", "inner/b/forward_l"]
    nested = rows(model)["inner"]
    assert (nested.compute_dtype, nested.decided_by) == (None, "its layers")
    assert nested.output_bytes is None  # Counted where it is made.
    assert rows(model)["b"].output_bytes == 16 * 2


def test_the_parts_of_an_attention_have_its_policy():
    shown = rows(with_an_attention(8))
    assert shown["a"].decided_by == "policy"
    assert shown["query"].decided_by == "its parent"


def test_weights_and_outputs_are_counted_in_float32_and_as_they_are():
    stack = lambda: layers.Dense(8, name="d"), lambda: layers.Reshape((2, 4))
    weights = 16 * 8 + 8
    # Weights in float16 have no copies.
    for policy, each, of_copies in (("mixed_float16", 4, 2), ("float16", 2, 0)):
        model = graph(*stack, policy=policy)
        row = rows(model)["d"]
        assert row.weight_bytes_float32 == 4 * weights, policy
        assert row.weight_bytes == each * weights, policy
        assert row.half_copy_bytes == of_copies * weights, policy
        assert (row.output_bytes_float32, row.output_bytes) == (4 * 8, 2 * 8), policy
        assert keras_mp.inspect(model).totals["output_bytes"] == 2 * 8 + 2 * 8, policy


def test_statistics_of_a_normalization_have_no_half_precision_copies():
    row = rows(graph(lambda: layers.BatchNormalization(name="n")))["n"]
    assert (row.compute_dtype, row.half_copy_bytes) == ("float16", 0)


def test_integers_are_as_large_as_they_are_under_every_policy():
    x = keras.Input((4,))
    row = rows(keras.Model(x, layers.CategoryEncoding(4, name="c")(x)))["c"]
    assert row.output_bytes == row.output_bytes_float32
    model = graph(lambda: layers.Flatten(name="f"), shape=(3, 2), dtype="int32")
    assert rows(model)["f"].output_bytes == 6 * 4


def test_a_size_that_the_graph_does_not_know_is_not_guessed():
    row = rows(graph(lambda: layers.Conv1D(8, 3, name="c"), shape=(None, 8)))["c"]
    assert row.output_dtype == "float16"
    assert (row.output_bytes, row.output_bytes_float32) == (None, None)


def test_a_layer_called_twice_is_shown_once_with_both_outputs():
    def twice(x):
        dense = layers.Dense(16, name="d")
        return dense(dense(x))

    model = functional(twice, 16)
    assert [row.path for row in keras_mp.inspect(model).layers] == ["d"]
    assert rows(model)["d"].output_bytes == 2 * 16 * 2


def test_what_a_subclassed_model_returns_is_not_known_without_a_run():
    keras_mp.set_global_policy("mixed_float16")
    model = Chained([layers.Dense(8, name="d")], name="net")
    model(np.ones((2, 16), "float32"))
    shown = rows(model)
    assert list(shown) == ["net", "d"]
    assert shown["d"].compute_dtype == "float16"
    assert shown["d"].output_dtype is None and shown["d"].output_bytes is None
    assert shown["d"].weight_bytes == 4 * (16 * 8 + 8)


def test_after_a_conversion_the_new_dtypes_are_shown():
    model = graph(lambda: layers.Dense(8, name="a"), lambda: layers.Dense(8))
    keras_mp.convert(model, "mixed_bfloat16")
    row = rows(model)["a"]
    assert (row.compute_dtype, row.output_dtype) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("model", [3, None, "model", keras.layers.Dense])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match="`model` must be .*Received: model="):
        keras_mp.inspect(model)


# How it is shown ------------------------------------------------------------------


def test_the_table_shows_every_class_and_is_what_python_prints():
    long_name = "a_layer_with_quite_a_long_name_of_its_own"
    found = keras_mp.inspect(graph(lambda: layers.UnitNormalization(name=long_name)))
    assert "UnitNormalization" in str(found)
    assert repr(found) == str(found)


def test_a_notebook_gets_a_table_with_all_columns():
    page = keras_mp.inspect(graph(lambda: layers.Dense(8, name="<d>")))._repr_html_()
    for text in ("&lt;d&gt;", "Dense", "float16", "float32", "policy", "half copies"):
        assert text in page
    assert "<d>" not in page


def test_the_dict_is_json_and_holds_everything():
    model = stock(lambda: layers.Dense(8, name="d"))
    inspection = keras_mp.inspect(model)
    data = inspection.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["layers"][0]["path"] == "d"
    assert data["layers"][0]["half_copy_bytes"] == 2 * (16 * 8 + 8)
    assert data["totals"] == inspection.totals
    assert data["warnings"][0]["paths"] == ["d"]
    assert set(data["warnings"][0]) == {"paths", "sentence", "remedy"}


def test_inspecting_changes_nothing():
    model = graph(
        lambda: layers.Dense(8), lambda: layers.Dense(8), lambda: layers.Dense(1)
    )
    model.compile("adam", "mse")

    def facts():
        yield [len(layer._inbound_nodes) for layer in model._flatten_layers()]
        yield [sorted(vars(layer)) for layer in model._flatten_layers()]
        yield json.dumps(model.get_config(), default=str)

    weights, before = values(model.variables), [*facts()]
    policies = [layer.dtype_policy for layer in model._flatten_layers()]
    str(keras_mp.inspect(model))
    assert same_bits(values(model.variables), weights)
    assert [*facts()] == before
    after = [layer.dtype_policy for layer in model._flatten_layers()]
    assert all(a is b for a, b in zip(after, policies, strict=True))


def test_a_model_that_is_not_built_stays_so():
    model = keras.Sequential([layers.Dense(8)])
    keras_mp.inspect(model)
    assert not model.built and not model.layers[0].built


# An output in half precision ------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_output_in_half_precision_is_reported_with_its_layer(dtype):
    policy = keras.DTypePolicy(f"mixed_{dtype}")
    model = graph(lambda: layers.Dense(8, name="head"), policy=policy)
    (warning,) = warnings_with(model, "output of the model")
    assert warning.paths == ("head",)
    assert dtype in warning.sentence and 'dtype="float32"' in warning.remedy


def test_an_output_that_compile_will_turn_to_float32_is_reported_and_is_turned():
    model = graph(lambda: layers.Dense(8))
    (warning,) = warnings_with(model, "output of the model")
    assert "`compile`" in warning.remedy
    model.compile("adam", "mse")
    assert not warnings_with(model, "output of the model")


@pytest.mark.parametrize(
    "outputs", [ops.tanh, lambda y: [y, y + 1]], ids=["an operation", "two outputs"]
)
def test_the_layer_that_makes_the_values_of_outputs_is_reported_once(outputs):
    model = functional(lambda x: outputs(layers.Dense(8, name="d")(x)), 8)
    (warning,) = warnings_with(model, "output of the model")
    assert warning.paths == ("d",)


def test_an_operation_that_makes_an_output_float16_itself_is_reported_by_its_name():
    x = keras.Input((8,))
    model = keras.Model(x, ops.cast(layers.Dense(8)(x), "float16"))
    (warning,) = warnings_with(model, "output of the model")
    assert warning.paths == (model.outputs[0]._keras_history.operation.name,)
    assert warning.remedy == 'Cast it to "float32".'


def test_in_a_nested_model_the_layer_of_the_users_own_dtype_is_reported():
    inner = sequential(layers.Dense(8, dtype="mixed_float16", name="half"))
    (warning,) = warnings_with(sequential(inner), "output of the model")
    assert warning.paths[0].endswith("half")
    assert warning.remedy == 'Give the layer dtype="float32".'


# An optimizer that does not scale --------------------------------------------------


def test_a_float16_model_whose_optimizer_does_not_scale_is_reported():
    model = graph(lambda: layers.Dense(8), lambda: layers.Dense(1, dtype="float32"))
    model.compile("adam", "mse", auto_scale_loss=False)
    (warning,) = warnings_with(model, "scale the loss")
    assert warning.paths == ("model",) and "Adam" in warning.sentence
    assert "keras_mp.LossScaleOptimizer" in warning.remedy


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        ("mixed_float16", lambda: "adam"),  # `compile` wraps it.
        (
            "mixed_float16",
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        ),
        ("mixed_float16", lambda: keras.optimizers.SGD(loss_scale_factor=128.0)),
        ("mixed_bfloat16", lambda: "adam"),
        ("float32", lambda: "adam"),
    ],
)
def test_an_optimizer_that_scales_or_need_not_is_not_reported(policy, optimizer):
    model = graph(lambda: layers.Dense(8), lambda: layers.Dense(1), policy=policy)
    model.compile(optimizer(), "mse")
    assert not warnings_with(model, "scale the loss")


# Casts by hand --------------------------------------------------------------------


def typed(cast, path, text=None):
    """A class of a layer that returns `cast`, whose file has `text` in its place."""
    names = {"layers": layers, "ops": ops}
    code = (
        f"class Typed(layers.Layer):\n    def call(self, x):\n        return {cast}\n"
    )
    path.write_text(code if text is None else text)
    exec(compile(code, str(path), "exec"), names)
    return names["Typed"]


def alone(layer_class, dtype, *args):
    """A layer that nobody has called, in a model."""
    with keras_mp.policy_scope(keras.DTypePolicy(dtype)):
        return keras.Sequential([layer_class(*args, name="layer")])


OWN = "self.compute_dtype"
TO_FLOAT16 = ("float16", ("mixed_bfloat16", "float32"), "mixed_float16")


@pytest.mark.parametrize(
    ("cast", "to", "reported_in", "passed_in"),
    [
        ("ops.cast(x, 'float16') * 2", *TO_FLOAT16),
        ("ops.cast(x, dtype='float16') * 2", *TO_FLOAT16),
        ("x.astype('float16')", *TO_FLOAT16),
        ("x.half()", *TO_FLOAT16),
        ("x.to(torch.float16)", *TO_FLOAT16),
        ("ops.sum(ops.cast(x, 'float32'), -1)", "float32", [MIXED], "float32"),
        # There and back; to the layer's own dtype, and to integers.
        (f"ops.cast(ops.exp(ops.cast(x, 'float32')), {OWN})", "", [], MIXED),
        (f"ops.cast(x, {OWN}) * ops.cast(x, x.dtype)", "", [], BRAIN),
        (f"ops.cast(ops.cast(ops.cast(x > 0, 'bool'), 'int32'), {OWN})", "", [], BRAIN),
    ],
)
def test_a_cast_by_hand_is_reported_where_the_layer_computes_in_another_dtype(
    cast, to, reported_in, passed_in, tmp_path
):
    layer_class = typed(cast, tmp_path / "typed.py")
    for dtype in reported_in:
        (warning,) = warnings_with(alone(layer_class, dtype), "by hand")
        assert warning.paths == ("layer",)
        assert f"`Typed.call` casts to {to} by hand" in warning.sentence
    assert not warnings_with(alone(layer_class, passed_in), "by hand")


def test_a_model_that_returns_float32_is_not_reported():
    class Net(keras.Model):
        def call(self, x):
            return ops.cast(x, "float32")

    with keras_mp.policy_scope(keras.DTypePolicy("mixed_float16")):
        assert not warnings_with(Net(), "by hand")


@pytest.mark.parametrize("text", [None, "It's no Python.\n", "x = (\n", '"""\n'])
def test_a_layer_without_a_source_is_not_reported(text, tmp_path):
    path = tmp_path / "changed_since.py"
    layer_class = typed("ops.cast(x, 'float16')", path, text=(text or "") * 3)
    if text is None:
        path.unlink()
    assert not warnings_with(alone(layer_class, "mixed_bfloat16"), "by hand")


# An epsilon that float16 cannot hold ----------------------------------------------


class WithEpsilon(layers.Layer):
    def __init__(self, epsilon, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def call(self, x):
        return x / (ops.mean(x) + self.epsilon)


class WithEps(layers.Layer):
    def __init__(self, eps, **kwargs):
        super().__init__(**kwargs)
        self.eps = eps

    def call(self, x):
        return x / (ops.mean(x) + self.eps)


class WithEpsilonInFloat32(WithEpsilon):
    def call(self, x):
        x = ops.cast(x, "float32")
        return ops.cast(x / (ops.mean(x) + self.epsilon), self.compute_dtype)


@pytest.mark.parametrize("layer_class", [WithEpsilon, WithEps])
@pytest.mark.parametrize(
    ("epsilon", "what"), [(1e-8, "1e-08 is 0 in float16"), (1e-6, "smallest normal")]
)
def test_an_epsilon_that_float16_cannot_hold_is_reported(layer_class, epsilon, what):
    (warning,) = warnings_with(alone(layer_class, "mixed_float16", epsilon), "epsilon")
    assert what in warning.sentence
    assert "keras_mp.MixedFloat16(float32=['layer'])" in warning.remedy


def test_an_epsilon_that_is_held_or_used_in_another_dtype_is_not_reported():
    for arguments in (
        (WithEpsilon, "mixed_float16", 1e-3),
        (WithEpsilon, "mixed_bfloat16", 1e-8),
        (WithEpsilon, "float32", 1e-8),
        (WithEpsilonInFloat32, "mixed_float16", 1e-8),
    ):
        assert not warnings_with(alone(*arguments), "epsilon"), arguments


def test_of_the_normalizations_of_keras_the_one_in_float16_is_reported():
    model = stock(
        lambda: layers.BatchNormalization(epsilon=1e-8),
        lambda: layers.LayerNormalization(epsilon=1e-8),
        lambda: layers.GroupNormalization(4, epsilon=1e-8),
        lambda: layers.RMSNormalization(epsilon=1e-8),
        shape=(4, 16),
    )
    assert not warnings_with(model, "epsilon")
    unit = layers.UnitNormalization
    assert warnings_with(stock(unit), "epsilon 1e-12 is 0 in float16")
    assert not warnings_with(graph(unit), "epsilon")  # In float32 under our policy.


def test_an_optimizers_epsilon_is_reported_only_where_weights_are_float16():
    for policy in ("mixed_float16", "float16"):
        model = graph(lambda: layers.Dense(8), policy=policy)
        model.compile(keras.optimizers.Adam(epsilon=1e-8), "mse")
        found = warnings_with(model, "epsilon")
        assert len(found) == (policy == "float16")
    assert "Adam" in found[0].sentence and found[0].paths == ("model",)


# Sums -----------------------------------------------------------------------------


def masked_average(steps, make, mask=True):
    return make(
        lambda: layers.Embedding(8, 8, mask_zero=mask),
        lambda: layers.GlobalAveragePooling1D(name="average"),
        shape=(steps,),
        dtype="int32",
    )


def test_an_average_under_a_mask_in_float16_over_many_steps_alone_is_reported():
    (warning,) = warnings_with(masked_average(5000, stock), "5000 elements")
    assert warning.paths == ("average",)
    assert "MixedFloat16(float32=['average'])" in warning.remedy
    assert not warnings_with(masked_average(2048, stock), "elements")
    assert not warnings_with(masked_average(5000, stock, mask=False), "elements")
    assert not warnings_with(masked_average(5000, graph), "elements")


def test_a_sum_over_many_elements_is_reported_and_a_mean_is_not():
    def model(operation, size, dtype="mixed_float16"):
        x = keras.Input((size,))
        y = layers.Activation("linear", dtype=dtype)(x)
        return keras.Model(x, operation(y, axis=-1))

    (warning,) = warnings_with(model(ops.sum, 4096), "4096 elements")
    assert "16 at most" in warning.sentence
    assert not warnings_with(model(ops.sum, 2048), "elements")
    assert not warnings_with(model(ops.mean, 4096), "elements")
    assert not warnings_with(model(ops.sum, 4096, "mixed_bfloat16"), "elements")
    assert not warnings_with(model(ops.sum, 4096, "float32"), "elements")


def test_the_sum_of_an_activity_regularizer_is_reported():
    def dense(units):
        return stock(lambda: layers.Dense(units, activity_regularizer="l2"))

    assert warnings_with(dense(4096), "activity_regularizer sums 4096 elements")
    assert not warnings_with(dense(8), "elements")


def test_a_wide_average_pooling_is_reported_except_on_torch():
    def pooled(window):
        return stock(lambda: layers.AveragePooling1D(window), shape=(4096, 8))

    assert bool(warnings_with(pooled(256), "256 values")) == (BACKEND != "torch")
    assert not warnings_with(pooled(16), "values")


# Widths ---------------------------------------------------------------------------


def test_widths_that_are_no_multiples_of_8_are_reported_in_one_line():
    model = graph(
        lambda: layers.Dense(30, name="a"),
        lambda: layers.Dense(32, name="b"),
        lambda: layers.Dense(32, name="c"),
    )
    (warning,) = warnings_with(model, "multiples of 8")
    assert warning.paths == ("a", "b")
    assert "(30)" in warning.sentence


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda n: layers.Conv2D(n, 3), (8, 8, 8)),
        (lambda n: layers.Conv2DTranspose(n, 3), (8, 8, 8)),
        (lambda n: layers.SeparableConv2D(n, 3), (8, 8, 8)),
        (lambda n: layers.EinsumDense("abc,cd->abd", (None, n)), (8, 8)),
        (lambda n: layers.LSTM(n), (8, 8)),
        (lambda n: layers.GRU(n), (8, 8)),
    ],
)
def test_the_widths_of_all_kinds_of_products_are_reported(make, shape):
    assert warnings_with(graph(lambda: make(30), shape=shape), "(30)")
    assert not warnings_with(graph(lambda: make(32), shape=shape), "multiples of 8")


def test_the_heads_of_an_attention_are_reported():
    (warning,) = warnings_with(with_an_attention(12), "multiples of 8")
    assert warning.paths == ("a",)  # Two heads of 12 are a product of 24.
    assert not warnings_with(with_an_attention(8), "multiples of 8")


def test_widths_in_float32_and_the_channels_of_an_image_are_not_reported():
    assert not warnings_with(
        graph(lambda: layers.Dense(30), policy="float32"), "multiples"
    )
    head = graph(lambda: layers.Dense(10, activation="softmax"))
    assert not warnings_with(head, "multiples of 8")
    image = graph(lambda: layers.Conv2D(8, 3), shape=(8, 8, 3))
    assert not warnings_with(image, "multiples of 8")


# Policies that files lose ---------------------------------------------------------


@keras.saving.register_keras_serializable(package="tests_inspection")
class KeepsItsDtype(layers.Layer):
    def call(self, x):
        return x + 1


@keras.saving.register_keras_serializable(package="tests_inspection")
class DropsItsDtype(KeepsItsDtype):
    def get_config(self):
        return {"name": self.name}


@keras.saving.register_keras_serializable(package="tests_inspection")
class TakesNoDtype(KeepsItsDtype):
    def __init__(self, name=None, trainable=True):
        super().__init__(name=name, trainable=trainable)


@keras.saving.register_keras_serializable(package="tests_inspection")
class MakesLayers(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)

    def call(self, x):
        return self.dense(x)


@keras.saving.register_keras_serializable(package="tests_inspection")
class MakesLayersOfItsOwnPolicy(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8, dtype=self.dtype_policy)

    def call(self, x):
        return self.dense(x)


def reopened(model, tmp_path):
    """What the layers compute in after saving and opening under float32."""
    model.save(tmp_path / "model.keras")
    with keras_mp.policy_scope("float32"):
        again = keras.models.load_model(tmp_path / "model.keras")
    return {layer.compute_dtype for layer in again._flatten_layers()}


def called(make):
    with keras_mp.policy_scope("mixed_float16"):
        model = make()
        model(np.ones((2, 16), "float32"))
    return model


def test_a_layer_whose_config_has_no_dtype_is_reported_and_loses_its_policy(tmp_path):
    model = called(lambda: sequential(DropsItsDtype(name="mine")))
    (warning,) = warnings_with(model, "saved file")
    assert warning.paths == ("mine",) or warning.paths[0].endswith("/mine")
    assert "DropsItsDtype.get_config" in warning.sentence
    assert reopened(model, tmp_path) == {"float32"}


def test_a_layer_that_takes_no_dtype_is_reported_and_its_file_cannot_be_opened(
    tmp_path,
):
    model = called(lambda: sequential(TakesNoDtype()))
    assert warnings_with(model, "TakesNoDtype.__init__` takes no dtype")
    with pytest.raises(TypeError):
        reopened(model, tmp_path)


def test_layers_that_a_class_makes_are_reported_and_lose_their_policy(tmp_path):
    model = called(MakesLayers)
    (warning,) = warnings_with(model, "saved file")
    assert warning.paths == (model.name,)
    assert "the layers that `MakesLayers` makes" in warning.sentence
    assert "float32" in reopened(model, tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sequential(layers.Dense(8), KeepsItsDtype()),
        MakesLayersOfItsOwnPolicy,
    ],
)
def test_policies_that_a_file_keeps_are_not_reported(make, tmp_path):
    model = called(make)
    assert not warnings_with(model, "saved file")
    assert "float16" in reopened(model, tmp_path)


def test_neither_is_a_float32_layer_nor_one_with_heads_of_keras():
    class Attention(layers.MultiHeadAttention):
        def __init__(self, heads=2, **kwargs):
            super().__init__(heads, 8, **kwargs)

    model = functional(lambda x: Attention()(x, x), 6, 16)
    assert not warnings_with(model, "saved file")
    assert not warnings_with(sequential(DropsItsDtype(), TakesNoDtype()), "saved file")


def test_a_clean_model_has_no_warnings():
    model = graph(
        lambda: layers.Dense(64, activation="relu"),
        lambda: layers.BatchNormalization(),
        lambda: layers.Dense(10, activation="softmax"),
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    assert keras_mp.inspect(model).warnings == ()
    assert "Look at" not in str(keras_mp.inspect(model))


def test_layers_that_are_alike_share_a_row_of_a_large_model():
    with keras_mp.policy_scope(MIXED):
        softmax = [layers.Dense(8, "softmax", name=f"soft_{i}") for i in range(3)]
        inner = keras.Sequential([keras.Input((8,)), *softmax], name="inner")
        model = keras.Sequential(
            [
                keras.Input((8,)),
                *(layers.Dense(8, name=f"dense_{i}") for i in range(30)),
                *(layers.LayerNormalization(name=f"norm_{i}") for i in range(10)),
                layers.Reshape((1, 1, 8), name="reshape"),
                layers.GlobalAveragePooling2D(name="pooling"),
                inner,
                layers.Dense(4, dtype="float32", name="head"),
            ],
            name="model",
        )
    found = keras_mp.inspect(model)
    text = found.text()
    assert text == str(found)
    table = text[text.index("computes") :]
    assert re.search(r"^dense_0 +float16 +float16 +policy +8\.6 kB", table, re.M)
    assert re.search(r"^and 29 more +\+4\.3 kB", table, re.M)
    assert "and 9 more" in table and "and 2 more" in table  # norms, softmax
    assert "dense_1 " not in table and "head" in table
    # What is said of the whole model stands first.
    assert text.index("Weights: ") < text.index("computes")
    assert "keras-mp inspect --all" in " ".join(text.split())
    every = found.text(every_layer=True)
    assert "share a row" not in every and "and 29 more" not in every
    paths = [layer.path for layer in found.layers]
    assert len(paths) == 47 and all(path in every.split() for path in paths)
    for lines in (text, every):
        words = {word for line in lines.splitlines() for word in line.split()}
        assert {"GlobalAveragePooling2D", "LayerNormalization"} <= words or (
            {"GlobalAverage", "Pooling2D"} <= words
        )
        assert max(map(len, lines.splitlines())) <= 80


def test_a_small_model_has_a_row_for_each_layer():
    model = graph(*(functools.partial(layers.Dense, 8) for _ in range(3)))
    text = str(keras_mp.inspect(model))
    assert "more" not in text and text == keras_mp.inspect(model).text(every_layer=True)


# Numbers, in what JAX and TensorFlow trace --------------------------------------------

traced = pytest.mark.skipif(BACKEND == "torch", reason="torch traces nothing")


class Constants(layers.Layer):
    """Computes with a constant."""

    def __init__(self, which, **kwargs):
        super().__init__(**kwargs)
        self.which = which

    def call(self, x):
        return self.which(x)

    def get_config(self):
        return {**super().get_config(), "which": self.which}


LOST = {
    "a divisor": (lambda x: x / ops.cast(70000, x.dtype), "70000 is inf"),
    "a number": (lambda x: x * 70000.0, "70000 is inf"),
    "a clip": (
        lambda x: ops.log(1 - ops.clip(ops.sigmoid(x), 1e-7, 1 - 1e-7)),
        "0.9999999 is 1",
    ),
    "a maximum": (lambda x: x / ops.maximum(ops.abs(x), 1e-12), "1e-12 is 0"),
    "a mask": (lambda x: x + (1 - ops.cast(x > 0, x.dtype)) * -1e9, "-1e+09 is -inf"),
    "beside another": (
        lambda x: ops.log(1 - x * x + 1e-5),
        "adds 1e-05 to a sum with 1",
    ),
    "before another": (lambda x: 1e-5 + (2 - x * x), "adds 1e-05 to a sum with 2"),
    "behind a ReLU": (lambda x: ops.relu(1 - x) + 1e-5, "adds 1e-05 to a sum with 1"),
    "behind a clip": (
        lambda x: 1e-5 - ops.reshape(ops.clip(x + 1, -9, 9), ops.shape(x)),
        "adds 1e-05 to a sum with 1",
    ),
    "ids": (
        lambda x: x + ops.cast(ops.cast(x[:, :1], "int32"), x.dtype),
        "casts float16 to int32: above 2048",
    ),
}
# Nothing is lost in these: products between the numbers, sizes alike, small integers.
KEPT = {
    "a product between": lambda x: (1 - x * x) * x + 1e-5,
    "a root between": lambda x: ops.sqrt(1 + ops.abs(x)) + 1e-5,
    "alike": lambda x: 1 - x * x + 1e-2,
    "one alone": lambda x: x * x + 1e-5,
    "in float32": lambda x: ops.cast(1 - ops.cast(x, "float32") + 1e-5, x.dtype),
    "bytes": lambda x: ops.cast(ops.cast(x, "uint8"), x.dtype),
    "a comparison": lambda x: x + ops.cast(ops.cast(x > 0, "int32"), x.dtype),
    "a place": lambda x: x + ops.cast(ops.argmax(x, -1, keepdims=True), x.dtype),
}


def says_of_numbers(model):
    said = "its constant", "it adds", "it casts"
    return [w for w in keras_mp.inspect(model).warnings if w.sentence.startswith(said)]


@traced
# What makes the constants, as the layer is called, may warn of those that overflow.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("which", "said"), LOST.values(), ids=LOST)
def test_a_constant_that_float16_turns_into_another_is_named(which, said):
    model = graph(
        lambda: layers.Dense(8),
        lambda: Constants(which, name="fault"),
        lambda: layers.Dense(8),
    )
    (warning,) = says_of_numbers(model)
    assert warning.paths == ("fault",)
    assert said.replace("+", "") in warning.sentence.replace("+", "")
    line = re.search(r"keras_mp\.MixedFloat16\(.*\)", warning.remedy).group()
    policy = eval(line, {"keras_mp": keras_mp})
    keras_mp.convert(model, policy)
    assert says_of_numbers(model) == []
    keras_mp.convert(model, "float32")
    assert says_of_numbers(model) == []


@traced
@pytest.mark.parametrize("which", ["beside another", "ids"])
def test_what_bfloat16_loses_is_named_too(which):
    function, said = LOST[which]
    said = said.replace("float16", "bfloat16").replace("2048", "256")
    model = graph(lambda: layers.Dense(8), lambda: Constants(function, name="fault"))
    keras_mp.convert(model, "mixed_bfloat16")
    model.get_layer("fault").dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    (warning,) = says_of_numbers(model)
    assert said in warning.sentence
    assert "keras_mp.MixedBFloat16(float32=['fault'])" in warning.remedy


@traced
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_number_that_only_float16_loses_is_not_named_in_bfloat16():
    function, _ = LOST["a number"]
    model = graph(lambda: layers.Dense(8), lambda: Constants(function))
    keras_mp.convert(model, "mixed_bfloat16")
    assert says_of_numbers(model) == []


@traced
@pytest.mark.parametrize("policy", [MIXED, "mixed_bfloat16"])
@pytest.mark.parametrize("which", KEPT.values(), ids=KEPT)
def test_what_loses_nothing_is_not_named(which, policy):
    model = graph(
        lambda: layers.Dense(8),
        lambda: Constants(which, name="fault"),
        lambda: layers.Dense(8),
    )
    keras_mp.convert(model, policy)
    assert says_of_numbers(model) == []


@traced
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_constant_of_a_subclassed_model_is_named_once_it_was_called():
    with keras_mp.policy_scope("mixed_float16"):
        dense, fault = layers.Dense(8), Constants(LOST["a mask"][0])
        model = Chained([dense, fault, dense])
        assert says_of_numbers(model) == []
        model(np.ones((2, 8), "float32"))
    before = values(model.variables)
    (warning,) = says_of_numbers(model)
    assert warning.paths == (fault.name,)
    assert same_bits(before, values(model.variables))


@pytest.mark.skipif(BACKEND != "torch", reason="the others trace")
def test_on_torch_it_is_said_that_a_run_finds_them():
    model = graph(lambda: layers.Dense(8), lambda: layers.Dense(8))
    assert "keras_mp.diagnose(model, x, y)" in str(keras_mp.inspect(model))


ORDINARY = {
    **{
        name: ((8,), lambda name=name: layers.Activation(name))
        for name in (
            "relu leaky_relu relu6 elu selu gelu silu softplus softsign mish tanh "
            "sigmoid hard_sigmoid hard_silu exponential log_sigmoid softmax celu glu "
            "log_softmax tanh_shrink hard_tanh hard_shrink soft_shrink"
        ).split()
    },
    "LayerNormalization": ((8,), lambda: layers.LayerNormalization(epsilon=1e-12)),
    "BatchNormalization": ((8,), lambda: layers.BatchNormalization(epsilon=1e-12)),
    "GroupNormalization": ((8,), lambda: layers.GroupNormalization(4, epsilon=1e-12)),
    "Normalization": ((8,), lambda: layers.Normalization(mean=0.0, variance=1e-12)),
    "Dropout": ((8,), lambda: layers.Dropout(0.1)),
    "Rescaling": ((8,), lambda: layers.Rescaling(1 / 255)),
    "Conv2D": ((8, 8, 8), lambda: layers.Conv2D(8, 3)),
    "MaxPooling2D": ((8, 8, 8), lambda: layers.MaxPooling2D()),
    "AveragePooling2D": ((8, 8, 8), lambda: layers.AveragePooling2D(2)),
    "GlobalMaxPooling2D": ((8, 8, 8), lambda: layers.GlobalMaxPooling2D()),
    "UpSampling2D": ((8, 8, 8), lambda: layers.UpSampling2D()),
    "LSTM": ((4, 8), lambda: layers.LSTM(8)),
    "GRU": ((4, 8), lambda: layers.GRU(8)),
    "Bidirectional": ((4, 8), lambda: layers.Bidirectional(layers.LSTM(8))),
    "Softmax": ((4, 8), lambda: layers.Softmax(dtype=keras.DTypePolicy(MIXED))),
    "ReLU": ((8,), lambda: layers.ReLU(6.0, 0.1, 0.1)),
}


@pytest.mark.parametrize(("shape", "make"), ORDINARY.values(), ids=ORDINARY)
def test_the_constants_of_ordinary_layers_are_not_named(shape, make):
    dense = lambda: layers.Dense(8)  # noqa: E731 (one of the stack)
    assert says_of_numbers(stock(dense, make, dense, shape=shape)) == []


def test_the_constants_of_an_attention_with_a_mask_are_not_named():
    with keras_mp.policy_scope(MIXED):
        tokens = keras.Input((6,), dtype="int32")
        x = layers.Embedding(10, 8, mask_zero=True)(tokens)
        x = layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
        model = keras.Model(tokens, layers.Dense(8)(x))
    assert says_of_numbers(model) == []


@pytest.mark.slow("A large model, of layers that others are made of too.")
def test_the_constants_of_a_mobilenet_are_not_named():
    with keras_mp.policy_scope(MIXED):
        model = keras.applications.MobileNetV3Small(weights=None)
    assert says_of_numbers(model) == []
