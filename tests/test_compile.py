"""Plain `compile("adam")`: which optimizers it scales, which outputs it keeps."""

import functools
import inspect

import keras
import numpy as np
import pytest
from backends import BACKEND, computes, dtype_of, same_bits, values

import keras_mp
from keras_mp import LossScaleOptimizer
from keras_mp.installing import install, uninstall

layers = keras.layers
X = np.linspace(-1, 1, 8, dtype="float32").reshape(4, 2)
Y = np.zeros((4, 1), "float32")


def sequential(*stack, shape=(2,)):
    return keras.Sequential([keras.Input(shape), *stack])


def regression(dtype=None):
    return sequential(layers.Dense(2, dtype=dtype), layers.Dense(1, dtype=dtype))


def compiled(model, optimizer="adam", **kwargs):
    model.compile(optimizer, "mse", **kwargs)
    return model


def fitted(model, y=Y):
    model.fit(X, y, verbose=0, batch_size=4)
    return model


def is_scaled(model):
    return isinstance(model.optimizer, LossScaleOptimizer)


def output_dtypes(model):
    return [tensor.dtype for tensor in model.outputs]


def assert_returns_float32(model, x=X):
    assert model.outputs[0].dtype == "float32"
    assert model.predict(x, verbose=0).dtype == "float32"


# Output layers --------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("activation", ["sigmoid", None, "tanh", "softmax"])
def test_the_output_layer_is_float32_whatever_its_activation(policy, activation):
    keras_mp.set_global_policy(policy)
    model = sequential(layers.Dense(2), layers.Dense(2, activation=activation))
    compiled(model)
    assert computes(model) == [policy.removeprefix("mixed_"), "float32"]
    policies = [layer.dtype_policy for layer in model.layers]
    assert {type(policy) for policy in policies} == {keras.DTypePolicy}
    assert [p.name for p in policies] == [policy, "float32"]
    assert_returns_float32(model)


def test_several_outputs_are_all_float32(mixed_float16):
    inputs = keras.Input((2,))
    hidden = layers.Dense(2, name="hidden")(inputs)
    price = layers.Dense(1, name="price")(hidden)
    kind = layers.Dense(2, activation="sigmoid", name="kind")(hidden)
    model = keras.Model(inputs, {"price": price, "kind": kind})
    model.compile("adam", {"price": "mse", "kind": "binary_crossentropy"})
    assert model.get_layer("hidden").compute_dtype == "float16"
    found = {name: tensor.dtype for name, tensor in model.output.items()}
    assert found == {"price": "float32", "kind": "float32"}


def test_a_layer_that_is_an_output_and_hidden_too_is_float32(mixed_float16):
    inputs = keras.Input((2,))
    first = layers.Dense(2)(inputs)
    second = layers.Dense(1)(first)
    model = compiled(keras.Model(inputs, [first, second]))
    assert output_dtypes(model) == ["float32", "float32"]


def test_a_sequential_without_input_keeps_its_output_in_float32(mixed_float16):
    model = keras.Sequential([layers.Dense(2), layers.Dense(1, activation="sigmoid")])
    compiled(model)
    fitted(model)
    assert computes(model) == ["float16", "float32"]
    assert model.outputs[0].dtype == "float32"


def test_the_output_layers_of_a_nested_model_are_float32(mixed_float16):
    head = sequential(layers.Dense(2), layers.Dense(1))
    body = sequential(layers.Dense(2), layers.Dense(2))
    inputs = keras.Input((2,))
    model = compiled(keras.Model(inputs, head(body(inputs))))
    assert computes(body) == ["float16", "float16"]
    assert computes(head) == ["float16", "float32"]
    assert_returns_float32(model)


def test_a_nested_model_as_the_last_of_a_sequential_without_input(mixed_float16):
    head = keras.Sequential([layers.Dense(2), layers.Dense(1)])
    model = compiled(keras.Sequential([layers.Dense(2), head]))
    assert dtype_of(model(X)) == model.outputs[0].dtype == "float32"
    assert computes(head) == ["float16", "float32"]


OUTPUT_LAYERS = {
    "TimeDistributed": lambda: layers.TimeDistributed(layers.Dense(1)),
    "Bidirectional": lambda: layers.Bidirectional(layers.LSTM(1)),
    "LSTM": lambda: layers.LSTM(1),
    "GRU": lambda: layers.GRU(1, return_sequences=True),
    "RNN": lambda: layers.RNN([layers.LSTMCell(1), layers.LSTMCell(1)]),
    "SpectralNormalization": lambda: layers.SpectralNormalization(layers.Dense(1)),
    "attention": lambda: layers.Attention(),
}


@pytest.mark.parametrize("make", OUTPUT_LAYERS.values(), ids=OUTPUT_LAYERS)
def test_an_output_layer_made_of_layers_is_float32_throughout(mixed_float16, make):
    layer = make()
    inputs = keras.Input((3, 2))
    first = layers.Dense(2)
    hidden = first(inputs)
    takes_two = isinstance(layer, layers.Attention)
    outputs = layer([hidden, hidden]) if takes_two else layer(hidden)
    model = compiled(keras.Model(inputs, outputs))
    # What has no weights is seen through.
    assert first.compute_dtype == ("float32" if takes_two else "float16")
    computing = [part.compute_dtype for part in layer._flatten_layers()]
    assert set(computing) == {"float32"}
    assert model.outputs[0].dtype == "float32"
    assert dtype_of(model(np.ones((1, 3, 2), "float32"))) == "float32"


def test_an_operation_on_the_last_layer_is_seen_through(mixed_float16):
    inputs = keras.Input((2,))
    hidden = layers.Dense(2, name="hidden")(inputs)
    scores = layers.Dense(2, name="scores")(hidden)
    model = keras.Model(inputs, keras.ops.exp(scores * 2 + 1))
    compiled(model)
    assert model.get_layer("hidden").compute_dtype == "float16"
    assert model.get_layer("scores").compute_dtype == "float32"
    assert_returns_float32(model)


@pytest.mark.parametrize("shape", [[keras.Input((2,))], []], ids=["built", "not built"])
def test_layers_without_weights_are_seen_through(mixed_float16, shape):
    stack = layers.Dense(4), layers.Dense(2), layers.Reshape((2, 1)), layers.Softmax(1)
    model = compiled(keras.Sequential([*shape, *stack]))
    model.build((None, 2))
    assert computes(model) == ["float16", "float32", "float32", "float32"]
    assert model.outputs[0].dtype == "float32"


def test_what_goes_on_elsewhere_is_hidden(mixed_float16):
    inputs = keras.Input((2,))
    stream, branches = layers.Dense(2)(inputs), [layers.Dense(2) for _ in range(3)]
    for branch in branches:
        stream = layers.Add()([stream, branch(stream)])
    model = compiled(keras.Model(inputs, layers.ReLU()(stream)))
    found = [branch.compute_dtype for branch in branches]
    assert found == ["float16", "float16", "float32"]
    assert model.layers[1].compute_dtype == "float16"
    assert output_dtypes(model) == ["float32"]


class MadeOfLayers(layers.Layer):
    """Returns what its last layer returns, or with `shift` more than that."""

    def __init__(self, shift=0):
        super().__init__()
        self.first, self.last, self.shift = layers.Dense(2), layers.Dense(1), shift

    def call(self, x):
        hidden = self.first(x)
        y = self.last(hidden)
        return {"y": y + self.shift if self.shift else y, "hidden": hidden}


def test_the_head_is_found_within_a_layer_made_of_layers(mixed_float16):
    inputs, layer = keras.Input((2,)), MadeOfLayers()
    y = layer(layers.Dense(2)(inputs))["y"]
    model = compiled(keras.Model(inputs, layers.Flatten()(y)))
    assert computes(model) == ["float16", "float16", "float16", "float32"]
    assert layer.first.compute_dtype == "float16"
    assert layer.last.compute_dtype == "float32"
    assert output_dtypes(model) == ["float32"]
    fitted(model)
    # In the middle of another model it is none.
    compiled(keras.Model(inputs, layers.Dense(1)(model.output)))
    assert layer.last.compute_dtype == "float16"


def test_what_a_layer_made_of_layers_computes_itself_is_its_own(mixed_float16):
    inputs, layer = keras.Input((2,)), MadeOfLayers(shift=1)
    model = compiled(keras.Model(inputs, layer(inputs)["y"]))
    assert layer.last.compute_dtype == "float16"
    assert dtype_of(model(X)) == "float32"


class Shared:
    """An encoder and a model around it, with layers in common."""

    def __init__(self):
        inputs = keras.Input((2,))
        self.code = layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True))
        code = self.code(layers.Reshape((1, 2))(inputs))
        self.encoder = keras.Model(inputs, code)
        self.head = layers.Dense(1)
        self.whole = keras.Model(inputs, self.head(code))

    def dtypes(self):
        inner = self.code.forward_layer, self.code.forward_layer.cell
        within = {layer.compute_dtype for layer in (self.code, *inner)}
        (code,) = within  # It is of one precision throughout.
        return code, self.head.compute_dtype


@pytest.mark.parametrize("first", ["encoder", "whole"])
def test_what_is_hidden_in_a_compiled_model_is_no_head_of_another(first, mixed_float16):
    shared = Shared()
    second = "whole" if first == "encoder" else "encoder"
    compiled(getattr(shared, first))
    compiled(getattr(shared, second))
    assert shared.dtypes() == ("float16", "float32")
    assert shared.encoder.output.dtype == "float16"
    assert shared.whole.output.dtype == "float32"
    assert shared.encoder.predict(X, verbose=0).dtype == "float32"


def test_a_head_alone_is_one_until_the_other_model_is_compiled(mixed_float16):
    shared = Shared()
    compiled(shared.encoder)
    assert shared.dtypes() == ("float32", "float16")
    fitted(shared.encoder, np.ones((len(X), 1, 4)))
    compiled(shared.whole)
    assert shared.dtypes() == ("float16", "float32")
    fitted(shared.encoder, np.ones((len(X), 1, 4)))
    fitted(shared.whole, np.ones((len(X), 1, 1)))
    keras_mp.convert(shared.encoder, "mixed_float16")
    assert shared.dtypes() == ("float16", "float32")


def test_a_model_that_was_compiled_and_then_nested_gives_its_head_up(mixed_float16):
    inner = compiled(sequential(layers.Dense(3), layers.Dense(4)))
    assert inner.layers[-1].compute_dtype == "float32"
    outer = compiled(sequential(inner, layers.Dense(1)))
    assert inner.layers[-1].compute_dtype == "float16"
    assert outer.layers[-1].compute_dtype == "float32"


def test_nesting_and_calling_alone_leave_a_head_what_it_is(mixed_float16):
    model = compiled(sequential(layers.Dense(3), layers.Dense(4)))
    serving = keras.Sequential([model, layers.Softmax()])
    assert serving.predict(X, verbose=0).dtype == "float32"
    layers.Dense(1)(model.output)
    assert model.layers[-1].compute_dtype == "float32"
    compiled(model)
    assert model.layers[-1].compute_dtype == "float32"


def test_a_discriminator_in_two_compiled_models_keeps_its_head(mixed_float16):
    discriminator = compiled(sequential(layers.Dense(3), layers.Dense(1)))
    generator = sequential(layers.Dense(2))
    compiled(keras.Sequential([keras.Input((2,)), generator, discriminator]))
    assert discriminator.layers[-1].compute_dtype == "float32"
    assert generator.layers[-1].compute_dtype == "float16"


def test_an_output_that_loses_its_loss_is_half_again(mixed_float16):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, [layers.Dense(1)(inputs), layers.Dense(2)(inputs)])
    for second, dtype in (("mse", "float32"), (None, "float16")):
        model.compile("sgd", ["mse", second])
        assert computes(model)[1:] == output_dtypes(model) == ["float32", dtype]


def test_integer_outputs_stay_integers(mixed_float16):
    inputs = keras.Input((2,))
    kind = keras.ops.argmax(layers.Dense(3)(inputs), axis=-1)
    model = keras.Model(inputs, [kind, layers.Dense(1)(inputs)])
    before = model.outputs[0].dtype
    compiled(model)
    assert output_dtypes(model) == [before, "float32"]


def test_compile_leaves_the_weights_as_they_are(mixed_float16):
    model = regression()
    before = model.get_weights()
    assert same_bits(before, compiled(model).get_weights())


@pytest.mark.usefixtures("installed")
def test_compile_changes_no_precision_without_a_policy_of_ours():
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(regression())
    assert computes(model) == ["float16", "float16"]
    assert is_scaled(model)


# When the optimizer is scaled -----------------------------------------------------


def test_the_global_policy_scales(mixed_float16):
    model = compiled(regression())
    assert is_scaled(model)
    assert isinstance(model.optimizer.inner_optimizer, keras.optimizers.Adam)
    assert float(model.optimizer.loss_scale) == 2.0**15


@pytest.mark.parametrize(
    "dtype",
    ["mixed_float16", "float16", keras_mp.MixedFloat16(), keras.DTypePolicy("float16")],
    ids=str,
)
@pytest.mark.usefixtures("installed")
def test_one_layer_scales_under_a_float32_global_policy(dtype):
    model = sequential(layers.Dense(2, dtype=dtype), layers.Dense(1))
    assert is_scaled(compiled(model))


@pytest.mark.usefixtures("installed")
def test_a_policy_map_scales_a_model_that_is_built_later():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies[".*half"] = "mixed_float16"
    half, full = (layers.Dense(2, name=n, dtype=policies) for n in ("half", "full"))
    model = fitted(compiled(keras.Sequential([half, layers.Dense(1)])))
    assert half.compute_dtype == "float16"
    assert is_scaled(model)
    assert not is_scaled(compiled(sequential(full)))


class Custom(keras.DTypePolicy):
    def _parse_name(self, name):
        return "float16", "float32"


@pytest.mark.parametrize(
    ("policy", "scales"),
    [
        (keras.DTypePolicy("float16"), True),
        (Custom("custom"), True),
        ("mixed_bfloat16", False),
        ("bfloat16", False),
        ("float32", False),
    ],
    ids=["float16", "of another name", "mixed_bfloat16", "bfloat16", "float32"],
)
def test_whatever_computes_in_float16_scales_and_nothing_else(policy, scales):
    keras_mp.set_global_policy(policy)
    assert is_scaled(compiled(regression())) == scales


@pytest.mark.usefixtures("installed")
def test_a_float16_layer_deep_inside_scales():
    deep = layers.TimeDistributed(layers.Dense(2, dtype="mixed_float16"))
    half = sequential(deep, shape=(3, 2))
    assert is_scaled(compiled(sequential(half, layers.Dense(1), shape=(3, 2))))


HOW = [{"run_eagerly": True}, {"jit_compile": True}, {}]
if BACKEND == "torch":
    HOW = [{}]  # Compiling is torch.compile's business there.


class Lazy(keras.Model):
    """A subclassed model whose layers do not exist when it is compiled."""

    def __init__(self, dtype_of_layers, **kwargs):
        super().__init__(**kwargs)
        self.dtype_of_layers = dtype_of_layers

    def build(self, shape):
        self.hidden = layers.Dense(2, dtype=self.dtype_of_layers)
        self.head = layers.Dense(1, dtype="float32")

    def call(self, x):
        return self.head(self.hidden(x))


@pytest.mark.parametrize("use", ["fit", "train_on_batch"])
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.sampled
@pytest.mark.usefixtures("installed")
def test_layers_that_a_subclassed_model_builds_later_scale(use, how):
    model = compiled(Lazy("mixed_float16"), **how)
    kwargs = {"verbose": 0} if use == "fit" else {}
    for steps in (1, 2):
        getattr(model, use)(X, Y, **kwargs)
        assert is_scaled(model)
        optimizer = model.optimizer
        assert int(optimizer.iterations) == int(optimizer.step_counter) == steps


def test_layers_that_are_built_later_in_float32_do_not_scale():
    assert not is_scaled(fitted(compiled(Lazy("float32"))))


def test_a_subclassed_model_under_the_global_policy_scales(mixed_float16):
    model = fitted(compiled(Lazy(None)))
    assert is_scaled(model)
    assert model.head.compute_dtype == "float32"


def test_a_model_of_float32_layers_does_not_scale_under_the_global_policy(
    mixed_float16,
):
    assert not is_scaled(compiled(regression(dtype="float32")))


def test_what_is_scaled_already_stays_as_it_is(mixed_float16):
    for scaler in (LossScaleOptimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = scaler(keras.optimizers.SGD())
        assert compiled(regression(), optimizer).optimizer is optimizer


def test_a_fixed_loss_scale_factor_is_respected(mixed_float16):
    optimizer = keras.optimizers.SGD(loss_scale_factor=128.0)
    model = fitted(compiled(regression(), optimizer))
    assert model.optimizer is optimizer


def test_an_optimizer_may_be_a_name_an_object_or_a_config(mixed_float16):
    object_ = keras.optimizers.SGD(0.5)
    config = keras.optimizers.serialize(keras.optimizers.SGD(0.25))
    for optimizer, rate in (("sgd", 0.01), (object_, 0.5), (config, 0.25)):
        model = compiled(regression(), optimizer)
        assert is_scaled(model)
        assert float(model.optimizer.learning_rate) == np.float32(rate)


def test_compile_without_arguments_scales_its_default_optimizer(mixed_float16):
    model = regression()
    model.compile()
    assert is_scaled(model)
    assert isinstance(model.optimizer.inner_optimizer, keras.optimizers.RMSprop)


# Compiling again ------------------------------------------------------------------


@pytest.mark.parametrize("which", ["inner", "wrapper"])
def test_compiling_again_with_the_same_optimizer_keeps_scale_and_moments(
    mixed_float16, which
):
    inner = keras.optimizers.Adam()
    model = fitted(compiled(regression(), inner))
    wrapper = model.optimizer
    wrapper.dynamic_scale.assign(64.0)
    state = values(wrapper.variables)
    compiled(model, inner if which == "inner" else wrapper, metrics=["mae"])
    assert model.optimizer is wrapper
    assert same_bits(state, values(wrapper.variables))
    fitted(model)
    assert float(wrapper.loss_scale) == 64.0
    assert int(wrapper.iterations) == 2


def test_compiling_again_with_a_new_optimizer_starts_anew(mixed_float16):
    model = compiled(regression())
    first = model.optimizer
    assert compiled(model).optimizer is not first


@pytest.mark.usefixtures("installed")
def test_an_optimizer_that_trained_in_float32_keeps_its_moments_when_it_is_wrapped():
    model = fitted(compiled(regression(), optimizer := keras.optimizers.Adam()))
    for layer in model.layers:
        layer.dtype_policy = "mixed_float16"
    state = values(optimizer.variables)
    compiled(model, optimizer)
    assert is_scaled(model)
    assert model.optimizer.inner_optimizer is optimizer
    assert same_bits(state, values(optimizer.variables))
    fitted(model)
    assert int(optimizer.iterations) == 2


def test_auto_scale_loss_false_leaves_a_wrapped_optimizers_inner_one_bare(
    mixed_float16,
):
    inner = keras.optimizers.SGD()
    model = compiled(regression(), inner)
    assert is_scaled(model)
    fitted(compiled(model, inner, auto_scale_loss=False))
    assert model.optimizer is inner


def test_two_models_with_one_optimizer_share_one_wrapper(mixed_float16):
    inner = keras.optimizers.SGD()
    first, second = compiled(regression(), inner), compiled(regression(), inner)
    assert first.optimizer is second.optimizer


# An overridden compile ------------------------------------------------------------


class WithOwnCompile(keras.Model):
    def compile(self, weight=1.0, **kwargs):
        super().compile(**kwargs)
        self.weight = weight
        self.scaled_in_own_compile = is_scaled(self)


def test_an_overridden_compile_that_calls_super_scales(mixed_float16):
    inputs = keras.Input((2,))
    model = WithOwnCompile(inputs, layers.Dense(1)(layers.Dense(2)(inputs)))
    model.compile(weight=2.0, optimizer="adam", loss="mse")
    assert (model.weight, model.scaled_in_own_compile) == (2.0, True)
    assert model.outputs[0].dtype == "float32"


def test_a_bad_argument_of_compile_is_reported_in_the_words_of_keras(mixed_float16):
    model = regression()
    with pytest.raises(TypeError, match="unexpected keyword argument 'los'"):
        model.compile("adam", los="mse")
    with pytest.raises(ValueError, match="Could not interpret|Unknown|identifier"):
        model.compile("no such optimizer")
    assert computes(model) == ["float16", "float16"]


def test_positional_arguments_of_compile_mean_what_they_mean_in_keras(mixed_float16):
    model = regression()
    model.compile("sgd", "mse", None, None, None, True, 1, False, False)
    assert model.run_eagerly is True
    assert isinstance(model.optimizer, keras.optimizers.SGD)


# The seams ------------------------------------------------------------------------

TRAINER = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
BACKEND_TRAINER = next(
    c for c in keras.Model.__mro__ if "make_train_function" in vars(c)
)
SEAMS = [
    (layers.Layer, "__call__"),
    (layers.Layer, "get_config"),
    (TRAINER, "compile"),
    (BACKEND_TRAINER, "make_train_function"),
    (TRAINER, "get_metrics_result"),
]


def seams():
    return [vars(owner)[name] for owner, name in SEAMS]


def test_the_seams_can_be_removed_and_installed_again(mixed_float16):
    def head_dtype():
        head = layers.Dense(2, activation="softmax")
        head(X)
        return head.compute_dtype

    originals = [seam._keras_mp_original for seam in seams()]
    for _ in range(2):
        uninstall()
        assert seams() == originals
    assert head_dtype() == "float16"
    keras_mp.set_global_policy("mixed_float16")
    installed = seams()
    install()
    assert seams() == installed
    assert is_scaled(compiled(regression()))
    assert head_dtype() == "float32"


def test_without_the_seams_keras_is_as_it_was():
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(regression())
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    assert computes(model) == ["float16", "float16"]


@pytest.mark.usefixtures("installed")
def test_another_librarys_wrapper_round_ours_is_left_in_its_place(monkeypatch):
    owner, name = SEAMS[0]

    @functools.wraps(vars(owner)[name])
    def theirs(*args, **kwargs):
        return theirs.__wrapped__(*args, **kwargs)

    monkeypatch.setattr(owner, name, theirs)
    uninstall()
    assert vars(owner)[name] is theirs
    install()
    assert vars(owner)[name] is theirs
    monkeypatch.undo()  # It goes, and ours is still there.
    uninstall()
    assert not hasattr(vars(owner)[name], "_keras_mp_original")


@pytest.mark.parametrize(("owner", "name"), SEAMS)
@pytest.mark.usefixtures("installed")
def test_a_seam_keeps_signature_name_and_docstring(owner, name):
    seam = vars(owner)[name]
    original = seam._keras_mp_original
    assert inspect.signature(seam) == inspect.signature(original)
    assert (seam.__name__, seam.__doc__) == (original.__name__, original.__doc__)
    assert seam.__qualname__ == original.__qualname__
