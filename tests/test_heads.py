"""The head of a model: products with half-precision operands and float32 results."""

import copy

import keras
import numpy as np
import pytest
from keras import layers, ops
from products import products_of

import keras_mp
from keras_mp.policies.weights import LARGE
from keras_mp.repairs.products import HalfOperands, half_operands

BACKEND = keras.backend.backend()
POLICIES = {
    "mixed_float16": "float16",
    "mixed_bfloat16": "bfloat16",
    "bfloat16": "bfloat16",
}
if BACKEND == "torch":
    # Of the other Keras computes the body in float32 on CPUs: see test_heads_torch.py.
    del POLICIES["mixed_float16"]
FEATURES, WIDTH, CLASSES, STEPS = 16, 256, LARGE // 256, 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

pytestmark = pytest.mark.skipif(
    BACKEND == "tensorflow", reason="see test_heads_tensorflow.py"
)


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    if BACKEND == "torch":
        from half_products_torch import use_kernel

        use_kernel(monkeypatch)


@pytest.fixture(params=POLICIES)
def half(request):
    keras_mp.set_global_policy(request.param)
    return POLICIES[request.param]


def ending_in(*head, features=(FEATURES,)):
    body = layers.Dense(WIDTH, "relu")
    return keras.Sequential([keras.Input(features), body, *head])


def dense(*after, **options):
    return ending_in(layers.Dense(CLASSES, **options), *after)


def lora():
    model = dense()
    model.layers[-1].enable_lora(4)
    return model


def wrapped():
    head = layers.TimeDistributed(layers.Dense(CLASSES))
    return ending_in(head, features=(STEPS, FEATURES))


def columns():
    head = layers.EinsumDense("abc,cde->abde", (STEPS, 2, CLASSES // 2))
    return ending_in(head, features=(STEPS, FEATURES))


def convolution(size, **options):
    filters = CLASSES * options.get("groups", 1) // size**2
    return keras.Sequential(
        [
            keras.Input((STEPS, STEPS, FEATURES)),
            layers.Conv2D(WIDTH, 3, padding="same", activation="relu"),
            layers.Conv2D(filters, size, padding="same", **options),
        ]
    )


def reversible(**options):
    ids = keras.Input((STEPS,), dtype="int32")
    embedding = layers.ReversibleEmbedding(CLASSES, WIDTH, **options)
    x = layers.Dense(WIDTH)(embedding(ids))
    return keras.Model(ids, embedding(x, reverse=True))


class Scores(layers.Layer):
    """A layer made of layers, as in the models of KerasHub."""

    def build(self, shape):
        self.dense = layers.Dense(CLASSES, dtype=self.dtype_policy)
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)


def concatenated():
    inputs = keras.Input((STEPS, FEATURES))
    hidden = layers.Dense(WIDTH, "relu")(inputs)
    levels = [layers.Cropping1D((0, n))(hidden) for n in (1, 2)]
    scores = Scores()
    return keras.Model(inputs, layers.Concatenate(axis=1)([*map(scores, levels)]))


# The products of the body come first: one, and one of its gradient, whose input is
# data. A product of weights alone is summed in float32 too.
HEADS = {
    "Dense": (dense, 1),
    "Dense without a bias": (lambda: dense(use_bias=False), 1),
    "softmax": (lambda: dense(activation="softmax"), 1),
    "EinsumDense": (lambda: ending_in(layers.EinsumDense("ab,bc->ac", CLASSES)), 1),
    "LoRA": (lora, 2),
    "TimeDistributed": (wrapped, STEPS),
    "two axes of columns": (columns, 1),
    "1x1 convolution": (lambda: convolution(1), 1),
    # The gradient by weights that are used twice is float32 too.
    "tied weights": (reversible, 2),
    "ReversibleEmbedding": (lambda: reversible(tie_weights=False), 1),
    "Dense, then softmax": (lambda: dense(layers.Activation("softmax")), 1),
    "made of layers, concatenated": (concatenated, 2),
}
CONVOLUTIONS = {
    "convolution": lambda: convolution(2),
    "convolution in groups": lambda: convolution(2, groups=CLASSES // 16),
}
if BACKEND == "jax":
    HEADS |= {name: (make, 1) for name, make in CONVOLUTIONS.items()}


def data_for(model, seed=0):
    generator = np.random.default_rng(seed)
    shape = (4, *model.inputs[0].shape[1:])
    if model.inputs[0].dtype == "int32":
        x = generator.integers(0, CLASSES, shape)
    else:
        x = generator.normal(size=shape).astype("float32")
    outputs = model.outputs[0].shape
    y = generator.integers(0, outputs[-1], (4, *outputs[1:-1]))
    return x, y.astype("int32")


def cross_entropy_of(model):
    activation = getattr(model.layers[-1], "activation", None)
    softmax = activation is keras.activations.softmax
    return keras.losses.SparseCategoricalCrossentropy(from_logits=not softmax)


def compiled(model, **options):
    model.compile(keras.optimizers.SGD(0.1), cross_entropy_of(model), **options)
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.sampled
@pytest.mark.kernels
def test_every_product_has_half_operands_and_the_head_float32_results(name, half):
    make, wide = HEADS[name]
    if name == "tied weights" and keras_mp.global_policy().name == "bfloat16":
        wide = 1  # Of bfloat16 weights each gradient is bfloat16.
    model = compiled(make())
    products = products_of(model, *data_for(model))
    assert set(products) == {half, f"{half} -> float32"}
    assert products[f"{half} -> float32"] == wide
    assert model.outputs[0].dtype == "float32"


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.sampled
def test_it_trains_as_float32_does(name):
    # The policies take turns.
    policy, half = list(POLICIES.items())[list(HEADS).index(name) % len(POLICIES)]
    with keras_mp.policy_scope("float32"):
        model = compiled(HEADS[name][0]())
    weights, batch = model.get_weights(), data_for(model)
    losses = [float(model.train_on_batch(*batch)) for _ in range(3)]
    keras_mp.set_global_policy(policy)
    model = compiled(HEADS[name][0]())
    model.set_weights(weights)
    for expected in losses:
        assert float(model.train_on_batch(*batch)) == pytest.approx(
            expected, rel=2 * 2.0 ** (-11 if half == "float16" else -8)
        )


class Net(keras.Model):
    """A subclassed model that returns what `outputs` makes of its layers' outputs."""

    def __init__(self, outputs=lambda hidden, logits: logits, head=None):
        super().__init__()
        self.body = layers.Dense(WIDTH, "relu")
        self.head = head or layers.Dense(CLASSES)
        self.outputs_of = outputs

    def call(self, x):
        hidden = self.body(x)
        return self.outputs_of(hidden, self.head(hidden))


class Residual(layers.Layer):
    """A layer made of layers."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(WIDTH)
        self.last = layers.Dense(CLASSES)

    def call(self, x):
        return self.last(x + self.dense(x))


def trained(model, loss=LOSS):
    x = np.random.default_rng(0).normal(size=(4, FEATURES)).astype("float32")
    y = np.zeros((4,), "int32")
    y = {"logits": y} if isinstance(loss, dict) else y
    model.compile(keras.optimizers.SGD(0.1), loss)
    model.train_on_batch(x, y)
    return products_of(model, x, y)


@pytest.mark.parametrize("called_before", [False, True], ids=["compiled", "called"])
@pytest.mark.kernels
def test_what_a_subclassed_model_returns_is_its_head(called_before, half):
    model = Net()
    if called_before:
        outputs = model(np.ones((1, FEATURES), "float32"))
        assert keras.backend.standardize_dtype(outputs.dtype) == "float32"
        assert model.head.compute_dtype == half
    products = trained(model)
    assert products == {half: 4, f"{half} -> float32": 1}
    assert (model.body.compute_dtype, model.head.compute_dtype) == (half, "float32")


@pytest.mark.kernels
def test_so_is_the_last_layer_of_a_model_within():
    keras_mp.set_global_policy("mixed_bfloat16")

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = dense()

        def call(self, x):
            return self.inner(x)

    assert trained(Outer()) == {"bfloat16": 4, "bfloat16 -> float32": 1}


@pytest.mark.kernels
def test_only_what_a_loss_reads_is(half):
    model = Net(lambda hidden, logits: {"hidden": hidden, "logits": logits})
    assert trained(model, {"logits": LOSS, "hidden": None})[f"{half} -> float32"] == 1
    assert model.body.compute_dtype == half


@pytest.mark.parametrize(
    "model",
    [lambda: Net(lambda hidden, logits: logits * 2), lambda: Net(head=Residual())],
    ids=["an operation at the end", "a layer made of layers"],
)
def test_what_makes_no_output_itself_stays_half(model, half):
    model = model()
    trained(model)
    assert model.head.compute_dtype == half


class MaskedHead(layers.Layer):
    """As MaskedLMHead of KerasHub: it leaves its inputs as they are, and casts."""

    def __init__(self, embedding):
        super().__init__(autocast=False)
        self.embedding = embedding

    def build(self, shape):
        self.dense = layers.Dense(WIDTH, dtype=self.dtype_policy)
        self.bias = self.add_weight(shape=(CLASSES,))

    def call(self, x):
        logits = self.embedding(self.dense(x), reverse=True)
        return ops.cast(logits, self.compute_dtype) + self.bias


@pytest.mark.kernels
def test_of_a_head_made_of_layers_the_last_product_is_the_heads(half):
    ids = keras.Input((STEPS,), dtype="int32")
    embedding = layers.ReversibleEmbedding(CLASSES, WIDTH)
    model = compiled(keras.Model(ids, MaskedHead(embedding)(embedding(ids))))
    products = products_of(model, *data_for(model))
    # The gradient by a table that is used twice is float32, unless the table is half.
    wide = 1 if keras_mp.global_policy().variable_dtype == half else 2
    assert products == {half: 6 - wide, f"{half} -> float32": wide}
    head = model.layers[-1]
    assert (head.compute_dtype, head.dense.compute_dtype) == ("float32", half)


KEPT = {
    "small": lambda: ending_in(layers.Dense(CLASSES // 2)),
    "fed by the model's input": lambda: keras.Sequential(
        [keras.Input((WIDTH,)), layers.Dense(CLASSES)]
    ),
    "a dtype of the user's": lambda: dense(dtype="float32"),
    "float32=": lambda: dense(name="kept"),
    "recurrent": lambda: ending_in(layers.GRU(WIDTH * 2), features=(STEPS, FEATURES)),
}
if BACKEND != "jax":
    KEPT |= CONVOLUTIONS


@pytest.mark.parametrize("name", KEPT)
def test_products_of_other_heads_stay_in_float32(name, half):
    policies = (keras_mp.MixedFloat16, keras_mp.MixedBFloat16)
    kind = policies[half == "bfloat16"]
    keras_mp.set_global_policy(kind(float32=[".*kept"] if name == "float32=" else []))
    model = compiled(KEPT[name]())
    products = products_of(model, *data_for(model))
    assert set(products) <= {half, "float32"} and products["float32"] >= 2


@pytest.mark.kernels
def test_a_float16_gradient_is_half_only_where_the_loss_is_scaled(half):
    model = compiled(dense(), auto_scale_loss=False)
    products = products_of(model, *data_for(model))
    assert products["float32"] == (2 if half == "float16" else 0)
    assert products[f"{half} -> float32"] == 1


@pytest.mark.skipif(BACKEND != "jax", reason="its own ways to differentiate")
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_gradient_of_a_gradient_and_a_forward_one_agree_with_float32(tied, half):
    import jax
    import jax.numpy as jnp

    generator = np.random.default_rng(0)
    a, b = (jnp.asarray(generator.normal(size=s), "float32") for s in ((4, 8), (8, 3)))

    def plain(a, b):
        return jnp.sum(ops.matmul(a, b) ** 2)

    def rounded(a, b):
        with half_operands(HalfOperands(half, half, tied)):
            return plain(a, b)

    unit = 2.0 ** (-11 if half == "float16" else -8)
    backward = (
        lambda f: jax.grad(f, argnums=0),
        lambda f: jax.grad(f, argnums=1),
        lambda f: jax.jacrev(jax.grad(f)),
        lambda f: jax.vmap(jax.grad(f), (0, None)),
        lambda f: jax.grad(jax.checkpoint(f)),
    )
    forward = (
        lambda f: jax.hessian(f, argnums=1),
        lambda f: lambda a, b: jax.jvp(f, (a, b), (a, b))[1],
    )
    for derivative in backward if tied else (*backward, *forward):
        # What is rounded runs operation by operation: XLA might not round within one.
        expected, found = jax.jit(derivative(plain))(a, b), derivative(rounded)(a, b)
        scale = float(jnp.max(jnp.abs(expected)))
        assert float(jnp.max(jnp.abs(expected - found))) <= 8 * unit * scale


@pytest.mark.skipif(BACKEND != "jax", reason="where operations round one by one")
@pytest.mark.parametrize("spread", [1, 4])
def test_rounding_is_that_of_operands_and_not_of_results(spread, half):
    # Against float64: 256 features that arrive in half precision, 4096 classes.
    import jax
    import jax.numpy as jnp

    generator = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(generator.normal(size=(64, 256)), half), "float64")
    w = generator.normal(size=(256, 4096)) * spread / 16
    y = generator.integers(0, 4096, 64)
    logits = x @ w
    log_sums = np.log(np.exp(logits).sum(axis=1))
    losses = log_sums - logits[np.arange(64), y]
    slope = np.exp(logits - log_sums[:, None])
    slope[np.arange(64), y] -= 1

    def found(x, w):
        with half_operands(HalfOperands(half, half)):
            logits = ops.matmul(x, w)
        losses = ops.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return ops.sum(losses), (logits, losses)

    def error(value, exact):
        apart = np.asarray(value, "float64") - exact
        return np.sqrt(np.mean(apart**2) / np.mean(exact**2))

    gradient = jax.grad(found, argnums=(0, 1), has_aux=True)
    (dx, dw), (logits32, losses32) = gradient(
        *(jnp.asarray(a, "float32") for a in (x, w))
    )
    unit = 2.0 ** (-11 if half == "float16" else -8)
    assert error(logits32, logits) < 0.6 * unit
    assert error(dx, slope @ w.T) < unit and error(dw, x.T @ slope) < unit
    # To round results too adds about as much again, in squares.
    rounded = jnp.asarray(logits32, half).astype("float32")
    losses16 = ops.sparse_categorical_crossentropy(y, rounded, from_logits=True)
    assert error(losses32, losses) ** 2 < 0.7 * error(losses16, losses) ** 2


@pytest.mark.parametrize("dtype", [None, "float32"], ids=["", "float32 by the user"])
@pytest.mark.kernels
def test_a_reopened_model_computes_what_it_did(dtype, half, tmp_path):
    model = compiled(dense(name="head", dtype=dtype))
    batch = data_for(model)
    products = products_of(model, *batch)
    assert products["float32"] == (3 if dtype else 0)
    model.save(tmp_path / "model.keras")
    for global_policy in ("float32", keras_mp.global_policy()):
        keras_mp.set_global_policy(global_policy)
        reopened = keras.models.load_model(tmp_path / "model.keras")
        reopened.optimizer.build(reopened.trainable_variables)
        assert products_of(reopened, *batch) == products
    config = model.layers[-1].get_config()["dtype"]
    assert config["class_name"] == "DTypePolicy"
    assert config["config"]["name"] == "float32"


def test_copies_and_conversions_compute_what_the_model_did(half):
    model = compiled(dense())
    batch = data_for(model)
    products = products_of(model, *batch)
    copied = copy.deepcopy(model)
    copied.optimizer.build(copied.trainable_variables)
    assert products_of(copied, *batch) == products
    policy = keras_mp.global_policy()
    if policy.variable_dtype == "bfloat16":
        return  # Nothing converts it.
    assert set(products_of(keras_mp.convert(model, "float32"), *batch)) == {"float32"}
    assert products_of(keras_mp.convert(model, policy), *batch) == products
