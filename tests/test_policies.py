"""Policies: what is in force, what stays in float32, and who has the last word."""

import asyncio
import concurrent.futures
import functools

import keras
import numpy as np
import pytest
from backends import POLICIES, computes, dtype_of, native_softmax
from products import products_of
from test_conversion import small

import keras_mp
from keras_mp.policies.hardware import Recommendation

layers = keras.layers
X = np.ones((1, 2), "float32")


def softmax_head(units=2, **options):
    return layers.Dense(units, activation="softmax", **options)


# The global policy ----------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_one_line_sets_the_policy_of_all_layers_created_from_here_on(name):
    before = layers.Dense(1)
    keras_mp.set_global_policy(name)
    after = layers.Dense(1)
    assert before.compute_dtype == "float32"
    assert (after.compute_dtype, after.variable_dtype) == (POLICIES[name], "float32")
    keras_mp.set_global_policy("float32")
    assert layers.Dense(1).compute_dtype == "float32"


def test_the_global_policy_is_the_object_that_was_set():
    policy = keras_mp.MixedFloat16(float32=[layers.LayerNormalization])
    keras_mp.set_global_policy(policy)
    assert keras_mp.global_policy() is policy
    assert keras.config.dtype_policy() is policy


def in_a_thread(function):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.fixture
def recommend(monkeypatch):
    """Makes the hardware recommend a policy, and says how often it is looked at."""

    def recommend(name):
        looks = []

        def recommended_policy():
            looks.append("look")
            return Recommendation(name, "why", ())

        policy = keras_mp.policies.policy
        monkeypatch.setattr(policy, "recommended_policy", recommended_policy)
        return looks

    return recommend


@pytest.mark.once("Keras keeps the global policy, whatever the backend.")
@pytest.mark.parametrize("name", ["mixed_float16", "auto"])
def test_the_global_policy_holds_after_clear_session(name, recommend):
    recommend("mixed_bfloat16")
    keras_mp.set_global_policy(name)
    policy = keras_mp.global_policy()
    keras.utils.clear_session()
    assert layers.Dense(1).compute_dtype == policy.compute_dtype != "float32"
    assert keras_mp.global_policy() is policy
    keras.utils.clear_session()
    assert keras.dtype_policies.get(None) is policy


def test_the_global_policy_holds_in_threads_that_start_later(mixed_float16):
    def trained():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0)
        return model, keras.config.dtype_policy()

    model, policy = in_a_thread(trained)
    assert policy is keras_mp.global_policy()
    assert computes(model) == ["float16", "float32"]
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)


def name_in_force():
    return keras.config.dtype_policy().name


def test_what_a_scope_sets_holds_in_its_thread_alone(mixed_float16):
    with keras_mp.policy_scope("mixed_bfloat16"):
        here, elsewhere = name_in_force(), in_a_thread(name_in_force)
    assert (here, elsewhere) == ("mixed_bfloat16", "mixed_float16")


async def in_turns(*tasks):
    """Runs the tasks, each to its next `asyncio.sleep(0)` in turn."""
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("process", ["float32", "mixed_float16"])
def test_what_a_scope_sets_holds_in_its_task_alone(process):
    keras_mp.set_global_policy(process)

    async def within(name, seen):
        with keras_mp.policy_scope(name):
            for _ in range(3):
                seen.append((name_in_force(), layers.Dense(1).compute_dtype))
                await asyncio.sleep(0)
        seen.append(name_in_force())
        return seen

    async def without(seen):
        for _ in range(5):
            seen.append(name_in_force())
            await asyncio.sleep(0)
        return seen

    half, brain, outside = asyncio.run(
        in_turns(within("mixed_float16", []), within("mixed_bfloat16", []), without([]))
    )
    assert half == [("mixed_float16", "float16")] * 3 + [process]
    assert brain == [("mixed_bfloat16", "bfloat16")] * 3 + [process]
    assert outside == [process] * 5
    assert name_in_force() == process


def test_a_task_keeps_the_scope_it_was_created_in(mixed_float16):
    async def later():
        await asyncio.sleep(0)
        return name_in_force()

    async def main():
        with keras_mp.policy_scope("mixed_bfloat16"):
            task = asyncio.create_task(later())
            in_thread = await asyncio.to_thread(name_in_force)
        return name_in_force(), in_thread, await task

    expected = "mixed_float16", "mixed_bfloat16", "mixed_bfloat16"
    assert asyncio.run(main()) == expected
    assert name_in_force() == "mixed_float16"


def test_what_keras_setter_says_in_a_task_stays_out_of_the_scopes_of_others():
    keras_mp.set_global_policy("float32")

    async def scope(seen):
        with keras_mp.policy_scope("mixed_bfloat16"):
            for _ in range(3):
                seen.append(name_in_force())
                await asyncio.sleep(0)
        return [*seen, name_in_force()]

    async def setter():
        keras.config.set_dtype_policy("mixed_float16")
        await asyncio.sleep(0)
        return name_in_force()

    seen, set_to = asyncio.run(in_turns(scope([]), setter()))
    assert seen == ["mixed_bfloat16"] * 3 + ["mixed_float16"]
    assert set_to == name_in_force() == in_a_thread(name_in_force) == "mixed_float16"


def test_scopes_of_generators_may_end_in_any_order(mixed_float16):
    """What is suspended within its scope leaves it in force, and nothing after it."""

    def suspended(name):
        with keras_mp.policy_scope(name):
            yield name_in_force()

    first, second = suspended("float32"), suspended("mixed_bfloat16")
    assert (next(first), next(second)) == ("float32", "mixed_bfloat16")
    first.close()
    assert name_in_force() == "mixed_bfloat16"
    second.close()
    assert name_in_force() == "mixed_float16"
    with keras_mp.policy_scope("float32"):
        third = suspended("mixed_bfloat16")
        next(third)
    third.close()
    assert name_in_force() == "mixed_float16"


def test_a_scope_that_ends_in_another_task_than_it_began_in_leaves_nothing(
    mixed_float16,
):
    """As an asynchronous fixture does, set up and torn down in a task each."""

    async def fixture():
        with keras_mp.policy_scope("mixed_bfloat16"):
            yield name_in_force()

    async def main():
        values = fixture()
        inside = await asyncio.create_task(anext(values))
        between = name_in_force()
        await asyncio.create_task(values.aclose())
        return inside, between, name_in_force()

    assert asyncio.run(main()) == ("mixed_bfloat16", "mixed_float16", "mixed_float16")


@pytest.mark.once("Keras keeps the global policy, whatever the backend.")
def test_a_scope_holds_after_clear_session(mixed_float16):
    with keras_mp.policy_scope("mixed_bfloat16"):
        keras.utils.clear_session()
        assert name_in_force() == "mixed_bfloat16"
        keras_mp.set_global_policy("auto")
        assert name_in_force() == keras_mp.recommended_policy().name
    assert name_in_force() == "mixed_float16"


def test_a_scope_holds_while_keras_is_as_it_was():
    with keras_mp.policy_scope("mixed_bfloat16"):
        keras_mp.uninstall()
        assert name_in_force() == "mixed_bfloat16"
    assert name_in_force() == "float32"
    with keras_mp.policy_scope("mixed_float16"):
        assert name_in_force() == "mixed_float16"
    assert name_in_force() == "float32"


# `clear_session` collects garbage, which takes seconds in a process of many tests.
@pytest.mark.once("Keras keeps the global policy, whatever the backend.")
@pytest.mark.parametrize(
    ("module", "setter"),
    [
        (keras.config, "set_dtype_policy"),
        (keras.mixed_precision, "set_dtype_policy"),
        (keras.mixed_precision, "set_global_policy"),
    ],
)
def test_the_last_word_counts_whoever_says_it(module, setter, mixed_float16):
    getattr(module, setter)("float32")
    keras.utils.clear_session()
    assert (name_in_force(), in_a_thread(name_in_force)) == ("float32", "float32")
    assert keras_mp.global_policy().name == layers.Dense(1).dtype_policy.name
    keras_mp.set_global_policy("mixed_bfloat16")
    keras.utils.clear_session()
    assert name_in_force() == in_a_thread(name_in_force) == "mixed_bfloat16"


def test_what_keras_setter_says_in_a_scope_ends_with_it(mixed_float16):
    with keras_mp.policy_scope("mixed_bfloat16"):
        keras.config.set_dtype_policy("float32")
        assert name_in_force() == "float32"
    assert name_in_force() == "mixed_float16"
    keras.utils.clear_session()
    assert name_in_force() == "mixed_float16"


def test_a_name_that_keras_refuses_is_no_last_word(mixed_float16):
    with pytest.raises(ValueError):
        keras.config.set_dtype_policy("mixed_float61")
    keras.utils.clear_session()
    assert name_in_force() == "mixed_float16"


@pytest.mark.filterwarnings("ignore:.*Did you mean .mixed_float16")
def test_the_global_policy_may_be_the_name_of_a_float_dtype_or_a_policy_of_keras():
    for name in ("float16", "bfloat16", "float64", "float32"):
        keras_mp.set_global_policy(name)
        assert keras_mp.global_policy().name == name
    stock = keras.DTypePolicy("mixed_float16")
    keras_mp.set_global_policy(stock)
    assert keras_mp.global_policy() is stock


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("fp16", r".*Did you mean 'mixed_float16'\?"),
        ("bf16", r".*Did you mean 'mixed_bfloat16'\?"),
        ("half", r".*Did you mean 'mixed_float16'\?"),
        ("mixed-float16", r".*Did you mean 'mixed_float16'\?"),
        ("MIXED_FLOAT16", r".*Did you mean 'mixed_float16'\?"),
        ("mixed_bfloat16 ", r".*Did you mean 'mixed_bfloat16'\?"),
        *((name, "") for name in ("mixed_float32", "", "int8", None, 16, object)),
    ],
)
def test_an_unknown_policy_is_refused_and_leaves_everything_unchanged(name, meant):
    before = keras_mp.MixedFloat16()
    keras_mp.set_global_policy(before)
    message = f"`policy` must be 'float32'.*Received: policy={meant}"
    with pytest.raises(ValueError, match=message):
        keras_mp.set_global_policy(name)
    with pytest.raises(ValueError, match=message), keras_mp.policy_scope(name):
        raise AssertionError("The block must not run.")
    assert keras_mp.global_policy() is before


def test_a_scope_restores_the_policy_after_an_exception():
    before = keras_mp.global_policy()
    with pytest.raises(ZeroDivisionError), keras_mp.policy_scope("mixed_float16"):
        1 / 0  # noqa: B018
    assert keras_mp.global_policy() is before


def test_scopes_nest_and_each_restores_the_policy_before():
    before = keras_mp.global_policy()
    with keras_mp.policy_scope("mixed_float16") as outer:
        assert keras_mp.global_policy() is outer
        with keras_mp.policy_scope("mixed_bfloat16") as inner:
            assert keras_mp.global_policy() is inner
            assert layers.Dense(1).compute_dtype == "bfloat16"
            with keras_mp.policy_scope("float32"):
                assert keras_mp.global_policy().name == "float32"
            assert keras_mp.global_policy() is inner
        assert keras_mp.global_policy() is outer
    assert keras_mp.global_policy() is before


def test_a_layer_keeps_the_policy_of_the_scope_it_was_created_in():
    with keras_mp.policy_scope("mixed_float16"):
        half, head = layers.Dense(2), softmax_head()
    assert [dtype_of(half(X)), dtype_of(head(X))] == ["float16", "float32"]


def test_a_scope_also_decorates_a_function():
    @keras_mp.policy_scope("mixed_float16")
    def build():
        return layers.Dense(1)

    assert [build().compute_dtype for _ in range(2)] == ["float16"] * 2
    assert keras_mp.global_policy().name == "float32"


# "auto" ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_auto_is_what_the_hardware_is_made_for(name, recommend):
    recommend(name)
    keras_mp.set_global_policy("auto")
    assert keras_mp.global_policy().name == name
    assert type(keras_mp.Policy("auto")) is type(keras_mp.Policy(name))
    with keras_mp.policy_scope("auto") as policy:
        assert policy.name == name
    assert computes(keras_mp.convert(small(), "auto"))[0] == policy.compute_dtype


@pytest.mark.parametrize(
    "ask", [lambda: layers.Dense(1), keras_mp.uninstall], ids=["a layer", "uninstall"]
)
def test_auto_looks_for_devices_when_somebody_asks(ask, recommend):
    looks = recommend("mixed_bfloat16")
    keras_mp.set_global_policy("auto")
    with keras_mp.policy_scope("float32"):
        assert layers.Dense(1).compute_dtype == "float32"
    assert looks == []
    ask()
    assert layers.Dense(1).compute_dtype == "bfloat16"
    assert looks == ["look"]


def test_auto_on_this_machine_raises_nothing_and_gives_a_reason():
    keras_mp.set_global_policy("auto")
    recommended = keras_mp.recommended_policy()
    assert keras_mp.global_policy().name == recommended.name
    assert recommended.reason


# The policy objects ---------------------------------------------------------------


def test_the_tf_keras_name_gives_the_classes():
    assert type(keras_mp.Policy("mixed_float16")) is keras_mp.MixedFloat16
    assert type(keras_mp.Policy("mixed_bfloat16")) is keras_mp.MixedBFloat16
    assert keras_mp.Policy("float32").name == "float32"
    policy = keras_mp.MixedFloat16()
    assert keras_mp.Policy(policy) is policy


@pytest.mark.parametrize("policy", [keras_mp.MixedFloat16, keras_mp.MixedBFloat16])
def test_the_classes_are_policies_of_keras_and_any_layers_dtype(policy):
    """Under Keras' own names, and under a float32 global policy."""
    policy = policy()
    assert isinstance(policy, keras.DTypePolicy)
    dtypes = policy.compute_dtype, policy.variable_dtype
    assert dtypes == (POLICIES[policy.name], "float32")
    half, head = layers.Dense(2, dtype=policy), softmax_head(dtype=policy)
    assert dtype_of(half(X)) == POLICIES[policy.name]
    assert half.kernel.dtype == "float32"
    assert dtype_of(head(X)) == dtype_of(layers.Dense(2)(X)) == "float32"


def test_a_policy_survives_serialization():
    policy = keras_mp.MixedFloat16()
    config = keras.saving.serialize_keras_object(policy)
    assert keras.saving.deserialize_keras_object(config) == policy


def test_policies_with_other_layers_in_float32_are_not_equal():
    assert keras_mp.MixedFloat16() == keras_mp.MixedFloat16()
    assert keras_mp.MixedFloat16() != keras_mp.MixedFloat16(float32=[layers.Dense])
    assert keras_mp.MixedFloat16() != keras_mp.MixedBFloat16()


def test_a_policy_shows_what_it_keeps_in_float32():
    assert repr(keras_mp.MixedFloat16()) == "MixedFloat16()"
    assert "decoder/.*" in repr(keras_mp.MixedFloat16(float32=["decoder/.*"]))
    recomputing = keras_mp.MixedFloat16(recompute_logits=True)
    assert recomputing != keras_mp.MixedFloat16()
    assert repr(recomputing) == "MixedFloat16(recompute_logits=True)"


# float32=[...] --------------------------------------------------------------------


class Decoder(layers.Layer):
    """A layer of layers, some of them made before it is built and some after."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.early = layers.Dense(2, name="early")

    def build(self, shape):
        self.late = layers.Dense(2, name="late")

    def call(self, x):
        return self.late(self.early(x))


class Net(keras.Model):
    """A subclassed model whose layers do not exist before its first call."""

    def build(self, shape):
        self.decoder = Decoder(name="decoder")
        self.norm = layers.LayerNormalization(name="norm")
        self.head = softmax_head(3, name="head")

    def call(self, x):
        return self.head(self.norm(self.decoder(x)))


FULL, HALF = "float32", "float16"
EXCEPTIONS = {
    "none": ([], [HALF, HALF, HALF]),
    "a class": ([layers.LayerNormalization], [HALF, HALF, FULL]),
    "an expression of the path": (["decoder/.*"], [FULL, FULL, HALF]),
    "of Keras' own path": (["net/decoder/.*"], [FULL, FULL, HALF]),
    "no whole path": (["early", "code.*", "net/nor", "nor"], [HALF, HALF, HALF]),
    "a predicate": ([lambda x: x.name in ("late", "norm")], [HALF, FULL, FULL]),
    # It takes all that it is made of with it.
    "a layer of layers": ([Decoder], [FULL, FULL, HALF]),
    "several": ([layers.LayerNormalization, r".*/ear\w+"], [FULL, HALF, FULL]),
}


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_what_the_exceptions_say_stays_in_float32_and_the_softmax_does(exception):
    float32, expected = EXCEPTIONS[exception]
    keras_mp.set_global_policy(keras_mp.MixedFloat16(float32=float32))
    model = Net(name="net")
    model(np.ones((2, 2), "float32"))
    chosen = [model.decoder.early, model.decoder.late, model.norm, model.head]
    assert [layer.compute_dtype for layer in chosen] == [*expected, FULL]
    # What the layers hold are stock policies of Keras.
    assert {type(layer.dtype_policy) for layer in chosen} == {keras.DTypePolicy}


def test_a_path_is_that_of_a_functional_layer_too(mixed_float16):
    keras_mp.set_global_policy(keras_mp.MixedFloat16(float32=["second"]))
    first = layers.Dense(2, name="first")(keras.Input((2,)))
    assert first.dtype == "float16"
    assert layers.Dense(2, name="second")(first).dtype == "float32"


@pytest.mark.parametrize(
    ("float32", "error", "message"),
    [
        ("decoder/.*", TypeError, r"must be a list or tuple.*Write float32=\['decoder"),
        (layers.Dense, TypeError, "must be a list or tuple"),
        (3, TypeError, "must be a list or tuple"),
        ([3], TypeError, "must hold layer classes.*Received"),
        ([int], TypeError, "must hold layer classes.*Received"),
        ([None], TypeError, "must hold layer classes.*Received"),
        ([layers.Dense(1)], TypeError, "must hold layer classes"),
        (["("], ValueError, "valid regular expressions.*Received"),
    ],
)
def test_an_exception_that_cannot_be_understood_is_refused(float32, error, message):
    with pytest.raises(error, match=message):
        keras_mp.MixedFloat16(float32=float32)


def test_recompute_logits_is_a_bool():
    with pytest.raises(TypeError, match="`recompute_logits` .* recompute_logits=4"):
        keras_mp.MixedFloat16(recompute_logits=4)


def test_a_policy_of_another_name_is_refused():
    with pytest.raises(ValueError, match="`name` must be 'mixed_float16'. Received"):
        keras_mp.MixedFloat16(name="mixed_bfloat16")


# Softmax --------------------------------------------------------------------------

SOFTMAX_LAYERS = {
    "Dense": lambda: softmax_head(3),
    "Dense log": lambda: layers.Dense(3, activation="log_softmax"),
    "Dense function": lambda: layers.Dense(3, activation=keras.activations.softmax),
    "Dense keras.ops": lambda: layers.Dense(3, activation=keras.ops.log_softmax),
    "Dense partial": lambda: layers.Dense(
        3, activation=functools.partial(keras.ops.softmax, axis=-1)
    ),
    "Dense layer": lambda: layers.Dense(3, activation=layers.Softmax()),
    "Dense framework": lambda: layers.Dense(3, activation=native_softmax),
    "EinsumDense": lambda: layers.EinsumDense("ab,bc->ac", 3, activation="softmax"),
    "Activation": lambda: layers.Activation("softmax"),
    "Activation log": lambda: layers.Activation("log_softmax"),
    "Activation framework": lambda: layers.Activation(native_softmax),
    "Softmax": lambda: layers.Softmax(),
}


@pytest.mark.parametrize("make", SOFTMAX_LAYERS.values(), ids=SOFTMAX_LAYERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_softmax_computes_and_returns_float32(policy, make):
    keras_mp.set_global_policy(policy)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, make()(layers.Dense(3)(inputs)))
    assert model.output.dtype == model.outputs[0].dtype == "float32"
    assert model.layers[1].output.dtype == POLICIES[policy]
    assert model.layers[2].compute_dtype == "float32"
    assert dtype_of(model(np.ones((2, 3), "float32"))) == "float32"


class Task(keras.Model):
    """A classifier as KerasHub has them: the activation of its head is an attribute."""

    def __init__(self, activation):
        inputs = keras.Input((4,))
        hidden = layers.Dense(8, activation="relu")(inputs)
        head = layers.Dense(3, activation=activation)
        super().__init__(inputs, head(layers.Dense(8)(hidden)))
        self.activation = keras.activations.get(activation)


@pytest.mark.parametrize("activation", ["softmax", None])
def test_a_softmax_that_a_model_keeps_as_an_attribute_is_not_its_own(activation):
    half = "bfloat16" if keras.backend.backend() == "torch" else "float16"
    keras_mp.set_global_policy(f"mixed_{half}")
    model = Task(activation)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=activation is None)
    model.compile("sgd", loss)
    x, y = np.ones((2, 4), "float32"), np.zeros((2,), "int32")
    model.fit(x, y, verbose=0)
    assert computes(model)[1:] == [half, half, "float32"]
    # Forward, for the kernel, and but for the first layer for its input.
    assert products_of(model, x, y) == {half: 5, "float32": 3}


def test_a_softmax_that_a_layer_keeps_as_an_attribute_is_not_its_own(mixed_float16):
    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = layers.Dense(8)
            self.activation = keras.activations.softmax

        def call(self, x):
            return self.inner(x)

    block = Block()
    assert dtype_of(block(np.ones((2, 3), "float32"))) == "float16"
    assert block.inner.compute_dtype == "float16"


def test_a_softmax_within_layers_is_found_wherever_it_is_built(mixed_float16):
    class Head(layers.Layer):
        def build(self, shape):
            self.inner = keras.Sequential([layers.Dense(4), layers.Softmax()])

        def call(self, x):
            return self.inner(x)

    head = Head()
    # A layer returns what its call returns; Keras casts what comes in only.
    assert dtype_of(head(X)) == "float32"
    assert head.inner.layers[0].compute_dtype == "float16"


def test_small_probabilities_do_not_vanish(mixed_float16):
    model = keras.Sequential([keras.Input((2,)), layers.Softmax()])
    logits = np.array([[0.0, -20.0]], "float32")
    assert float(model(logits)[0, 1]) == pytest.approx(2.06e-9, rel=1e-2)


@pytest.mark.slow("A large model, of layers that others are made of too.")
def test_a_softmax_of_keras_applications_is_float32(mixed_float16):
    model = keras.applications.MobileNetV2(
        weights=None, input_shape=(32, 32, 3), alpha=0.35, classes=3
    )
    assert model.output.dtype == "float32"
    assert model.get_layer("predictions").compute_dtype == "float32"
    assert model.get_layer("Conv1").compute_dtype == "float16"
    image = np.zeros((1, 32, 32, 3), "float32")
    assert model.predict(image, verbose=0).dtype == "float32"


@pytest.mark.parametrize("called", [False, True])
def test_a_copy_of_a_softmax_layer_is_float32_too(mixed_float16, called):
    head = softmax_head(3)
    if called:
        head(X)
    copy = layers.Dense.from_config(head.get_config())
    assert dtype_of(copy(X)) == "float32"


def test_the_head_of_a_cloned_model_is_float32_too(mixed_float16):
    model = keras.Sequential([layers.Dense(2), softmax_head(3)])
    clone = keras.models.clone_model(model)
    for each in (model, clone):
        each(X)
        assert computes(each) == ["float16", "float32"]
        assert each.outputs[0].dtype == "float32"


# What the user said ---------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float16", "mixed_float16", "bfloat16", "mixed_bfloat16", "float32"]
)
@pytest.mark.parametrize("as_object", [False, True])
def test_what_the_user_said_for_a_layer_always_wins(mixed_float16, dtype, as_object):
    said = keras.DTypePolicy(dtype) if as_object else dtype
    softmax = layers.Activation("softmax", dtype=said)
    stack = layers.Dense(2, dtype=said), softmax_head(dtype=said), softmax
    model = keras.Sequential([keras.Input((2,)), *stack])
    model(X)
    model.compile("sgd", "mse")
    expected = keras.DTypePolicy(dtype).compute_dtype
    assert computes(model) == [expected] * 3
    assert model.outputs[0].dtype == dtype_of(model(X)) == expected


def test_a_policy_that_the_user_sets_on_a_live_layer_wins(mixed_float16):
    head = softmax_head()
    head(X)
    head.dtype_policy = "mixed_float16"
    assert dtype_of(head(X)) == "float16"


def test_an_entry_of_a_policy_map_wins(mixed_float16):
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies["head"] = "mixed_bfloat16"
    head = softmax_head(name="head", dtype=policies)
    head.build((1, 2))  # A map is asked by the path, which a layer has from here on.
    assert dtype_of(head(X)) == "bfloat16"


@pytest.mark.parametrize("where", ["global", "default", "entry"])
def test_a_policy_of_ours_chooses_within_a_policy_map_too(where):
    keras_mp.set_global_policy("mixed_float16" if where == "global" else "float32")
    policies = keras.dtype_policies.DTypePolicyMap(
        default_policy=keras_mp.MixedFloat16() if where == "default" else None
    )
    if where == "entry":
        policies[".*(head|dense)"] = keras_mp.MixedFloat16()
    dense = layers.Dense(2, name="dense", dtype=policies)
    head = softmax_head(name="head", dtype=policies)
    model = keras.Sequential([keras.Input((2,)), dense, head])
    assert (dense.compute_dtype, head.compute_dtype) == ("float16", "float32")
    assert model.outputs[0].dtype == "float32"
    assert dtype_of(model(X)) == "float32"


def test_policies_of_keras_itself_choose_nothing():
    keras.config.set_dtype_policy("mixed_float16")
    head = softmax_head()
    assert dtype_of(head(X)) == "float16"


def test_autocast_and_masks_are_left_as_keras_has_them(mixed_float16):
    embedding = layers.Embedding(4, 2, mask_zero=True)
    tokens = np.array([[1, 2, 0]], "int32")
    assert dtype_of(embedding(tokens)) == "float16"
    assert np.array(embedding.compute_mask(tokens)).tolist() == [[True, True, False]]


def test_a_layer_that_forgot_super_gets_the_sentence_of_keras():
    class Forgetful(layers.Layer):
        def __init__(self):
            pass

        def call(self, x):
            return x

    with pytest.raises(RuntimeError, match="forgot to call `?super"):
        Forgetful()(X)
