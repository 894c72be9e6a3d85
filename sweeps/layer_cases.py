"""Every layer class of Keras with the inputs to measure it on, hard ones included.

A case is a layer and the arguments of its call. Its name is the class, then what is
special. Inputs whose last bits matter to the layer (tokens, ids) are exact in both half
dtypes, so that only the layer rounds; raw data (`Normalization`) is realistic.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import layers

ALL = ("jax", "tensorflow", "torch")
NO_LANCZOS = ("jax", "tensorflow")  # Keras has no Lanczos resizing on torch.


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer and the arguments of its call.

    Attributes:
        name: the class, and what is special after a comma.
        layer: () -> the layer, under the global policy.
        inputs: () -> the arguments of the call: arrays, or lists of arrays.
        options: () -> keyword arguments of the call: masks, `training`.
        gradient: whether the layer has gradients worth comparing.
        random_draws: how many independent random numbers the layer draws, 0 if none.
            They depend on the dtype in which they are drawn: only means are compared.
        finite_only: the reason, if the results can only be required to be finite.
        adapt: () -> the data that `adapt` sees, for layers that have it.
        backends: where the layer exists.
    """

    name: str
    layer: Callable[[], Any]
    inputs: Callable[[], list]
    options: Callable[[], Mapping[str, Any]] = dict
    gradient: bool = True
    random_draws: int = 0
    finite_only: str = ""
    adapt: Callable[[], Any] | None = None
    backends: tuple[str, ...] = ALL

    @property
    def cls(self) -> str:
        return self.name.split(",")[0]


SKIPPED = {
    "Layer": "abstract",
    "Wrapper": "abstract",
    "InputLayer": "computes nothing",
    "InputSpec": "not a layer",
    "FlaxLayer": "needs flax; JaxLayer, which it is made of, is measured",
    "TFSMLayer": "stays in float32: tests/test_rules.py has it",
}


def normal(*shape, scale=1.0, shift=0.0, seed=0):
    """Normal random numbers that bfloat16 and float16 hold exactly."""
    rng = np.random.default_rng(seed)
    return exact(shift + scale * rng.standard_normal(shape))


def exact(x):
    """Rounds to the 8 significant bits that bfloat16 and float16 both have."""
    mantissa, exponent = np.frexp(np.asarray(x, "float64"))
    return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype("float32")


def images(*shape, seed=0):
    """Pictures of whole numbers from 0 to 255, smooth enough to have edges."""
    rng = np.random.default_rng(seed)
    coarse = rng.uniform(0, 255, (shape[0], 4, 4, shape[3]))
    fine = coarse.repeat(shape[1] // 4, 1).repeat(shape[2] // 4, 2)
    return np.clip(np.round(fine + rng.normal(0, 10, shape)), 0, 255).astype("float32")


def full(value, *shape):
    return np.full(shape, value, "float32")


def integers(*shape, high, low=0, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape).astype("int32")


def lengths(batch, steps, *valid):
    """A mask whose rows are True for the numbers of steps in `valid`."""
    return np.arange(steps)[None, :] < np.array(valid)[:, None]


def training() -> dict[str, Any]:
    return {"training": True}


def _activations():
    x = lambda: [normal(4, 8)]  # noqa: E731
    # Small and large ones in every row.
    wide = lambda: [normal(4, 8) * full([1, 300] * 4, 4, 8)]  # noqa: E731
    yield Case("ELU", lambda: layers.ELU(), x)
    yield Case("LeakyReLU", lambda: layers.LeakyReLU(), x)
    yield Case("PReLU", lambda: layers.PReLU("random_normal"), x)
    yield Case("ReLU", lambda: layers.ReLU(6.0, 0.1, 0.5), x)
    yield Case("Softmax", lambda: layers.Softmax(), x)
    yield Case(
        "Softmax, two axes",
        lambda: layers.Softmax(axis=(1, 2)),
        lambda: [normal(2, 4, 6, scale=4)],
    )
    yield Case(
        "Softmax, two axes, large logits",
        lambda: layers.Softmax(axis=(1, 2)),
        lambda: [normal(2, 4, 6, scale=30)],
    )
    yield Case(
        "Softmax, mask",
        lambda: layers.Softmax(),
        lambda: [normal(4, 8)],
        lambda: {"mask": lengths(4, 8, 8, 5, 1, 3)},
    )
    yield Case(
        "Softmax, 30000 classes",
        lambda: layers.Softmax(),
        lambda: [normal(2, 30000)],
    )
    for name in ACTIVATIONS:
        yield Case(
            f"Activation, {name}",
            lambda name=name: layers.Activation(name),
            # The true exponential of large inputs is beyond float16.
            x if name == "exponential" else wide,
        )


ACTIVATIONS = (
    "celu elu exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_tanh "
    "leaky_relu linear log_sigmoid log_softmax mish relu relu6 selu sigmoid silu "
    "soft_shrink softmax softplus softsign sparse_plus sparse_sigmoid sparsemax "
    "squareplus tanh tanh_shrink"
).split()


def _core():
    yield Case("Dense", lambda: layers.Dense(5), lambda: [normal(4, 8)])
    yield Case(
        "Dense, 4096 inputs",
        lambda: layers.Dense(5),
        lambda: [normal(4, 4096)],
    )
    yield Case(
        "Dense, batch of 8192",
        lambda: layers.Dense(2),
        lambda: [normal(8192, 2)],
    )
    yield Case(
        "EinsumDense",
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"),
        lambda: [normal(2, 5, 8)],
    )
    yield Case(
        "Embedding",
        lambda: layers.Embedding(50, 4),
        lambda: [integers(3, 6, high=50)],
    )
    yield Case(
        "Embedding, ids as floats",
        lambda: layers.Embedding(5000, 4),
        lambda: [integers(3, 6, low=2100, high=5000).astype("float32")],
    )
    yield Case(
        "Embedding, one id 5000 times",
        lambda: layers.Embedding(8, 4),
        lambda: [np.zeros((2, 2500), "int32")],
    )
    yield Case(
        "ReversibleEmbedding",
        lambda: layers.ReversibleEmbedding(50, 4),
        lambda: [integers(3, 6, high=50)],
    )
    yield Case(
        "ReversibleEmbedding, reverse",
        lambda: layers.ReversibleEmbedding(50, 16),
        lambda: [normal(3, 6, 16)],
        lambda: {"reverse": True},
    )
    yield Case(
        "ReversibleEmbedding, reverse, soft cap, large tokens",
        lambda: layers.ReversibleEmbedding(
            50, 16, tie_weights=False, logit_soft_cap=30.0
        ),
        lambda: [normal(3, 6, 16, scale=100)],
        lambda: {"reverse": True},
    )
    yield Case("Identity", lambda: layers.Identity(), lambda: [normal(4, 8)])
    yield Case(
        "Lambda",
        lambda: layers.Lambda(lambda x: 2 * x, output_shape=lambda s: s),
        lambda: [normal(4, 8)],
    )
    yield Case(
        "Masking",
        lambda: layers.Masking(0.1),
        lambda: [
            np.where(
                lengths(3, 4, 4, 2, 1)[..., None], normal(3, 4, 2), np.float32(0.1)
            )
        ],
    )
    yield Case(
        "Masking, value past 65504",
        lambda: layers.Masking(-99999.0),
        lambda: [
            np.where(
                lengths(3, 4, 4, 2, 1)[..., None], normal(3, 4, 2), np.float32(-99999)
            )
        ],
    )


def _attention():
    # No biases: the softmax removes the key's bias from everything, and its gradient,
    # which is 0, cannot be compared.
    for name, scale in (
        ("", 1.0),
        (", tokens near 33", 33.0),
        (", tokens near 100", 100.0),
    ):
        # With logits of hundreds the softmax picks one row, and rounding picks another.
        sharp = "rounding the query and the key is enough to change all" * (scale > 1)
        token = lambda *s, seed=0, scale=scale: normal(*s, scale=scale, seed=seed)  # noqa: E731
        yield Case(
            "MultiHeadAttention" + name,
            lambda: layers.MultiHeadAttention(2, 64, use_bias=False),
            lambda token=token: [token(2, 8, 64), token(2, 8, 64, seed=1)],
            # A gradient of what is all but constant.
            gradient=scale == 1,
            finite_only=sharp,
        )
        yield Case(
            "GroupQueryAttention" + name,
            lambda: layers.GroupQueryAttention(64, 4, 2, use_bias=False),
            lambda token=token: [token(2, 8, 64), token(2, 8, 64, seed=1)],
            # A gradient of what is all but constant.
            gradient=scale == 1,
            finite_only=sharp,
        )
        yield Case(
            "Attention" + name,
            lambda: layers.Attention(),
            lambda token=token: [[token(2, 8, 64), token(2, 8, 64, seed=1)]],
        )
        yield Case(
            "AdditiveAttention" + name,
            lambda: layers.AdditiveAttention(),
            lambda token=token: [[token(2, 8, 64), token(2, 8, 64, seed=1)]],
        )
    for cls, build in (
        (
            "MultiHeadAttention",
            lambda **k: layers.MultiHeadAttention(2, 16, use_bias=False, **k),
        ),
        (
            "GroupQueryAttention",
            lambda **k: layers.GroupQueryAttention(16, 4, 2, use_bias=False, **k),
        ),
    ):
        mask = lambda: {"attention_mask": lengths(2, 8, 5, 8)[:, None, :].repeat(8, 1)}  # noqa: E731
        yield Case(
            cls + ", dropout",
            lambda build=build: build(dropout=0.1),
            lambda: [normal(2, 8, 32), normal(2, 8, 32, seed=1)],
            lambda: {"training": False},
        )
        yield Case(
            cls + ", mask",
            build,
            lambda: [normal(2, 8, 32), normal(2, 8, 32, seed=1)],
            mask,
        )
        yield Case(
            cls + ", dropout, mask",
            lambda build=build: build(dropout=0.1),
            lambda: [normal(2, 8, 32), normal(2, 8, 32, seed=1)],
            lambda mask=mask: {**mask(), "training": False},
        )
        yield Case(
            cls + ", a row fully masked",
            build,
            lambda: [normal(2, 8, 32), normal(2, 8, 32, seed=1)],
            lambda: {"attention_mask": lengths(2, 8, 0, 8)[:, None, :].repeat(8, 1)},
            finite_only="attention to nothing means nothing",
        )
        yield Case(
            cls + ", causal",
            build,
            lambda: [normal(2, 8, 32), normal(2, 8, 32, seed=1)],
            lambda: {"use_causal_mask": True},
        )
        yield Case(
            cls + ", scores",
            build,
            lambda: [normal(2, 8, 32), normal(2, 8, 32, seed=1)],
            lambda: {"return_attention_scores": True},
        )
    for cls, build in (
        ("Attention", lambda **k: layers.Attention(**k)),
        ("AdditiveAttention", lambda **k: layers.AdditiveAttention(**k)),
    ):
        pair = lambda: [[normal(2, 8, 16), normal(2, 6, 16, seed=1)]]  # noqa: E731
        yield Case(
            cls + ", mask",
            build,
            pair,
            lambda: {"mask": [lengths(2, 8, 8, 4), lengths(2, 6, 6, 3)]},
        )
        yield Case(
            cls + ", a row fully masked",
            build,
            pair,
            lambda: {"mask": [lengths(2, 8, 8, 4), lengths(2, 6, 6, 0)]},
        )
        yield Case(
            cls + ", causal",
            build,
            pair,
            lambda: {"use_causal_mask": True},
        )
    yield Case(
        "Attention, scaled",
        lambda: layers.Attention(use_scale=True),
        lambda: [[normal(2, 8, 16), normal(2, 6, 16, seed=1)]],
    )
    yield Case(
        "Attention, concat",
        lambda: layers.Attention(score_mode="concat"),
        lambda: [[normal(2, 8, 16), normal(2, 6, 16, seed=1)]],
    )


def _merging():
    pair = lambda: [[normal(3, 4), normal(3, 4, seed=1)]]  # noqa: E731
    for cls in (
        "Add",
        "Average",
        "Concatenate",
        "Maximum",
        "Minimum",
        "Multiply",
        "Subtract",
    ):
        yield Case(cls, lambda cls=cls: getattr(layers, cls)(), pair)
    yield Case(
        "Average, sum past 65504",
        lambda: layers.Average(),
        lambda: [[full(30000, 3, 4), full(20000, 3, 4), full(40000, 3, 4)]],
    )
    yield Case("Dot", lambda: layers.Dot(1), pair)
    yield Case("Dot, normalize", lambda: layers.Dot(1, normalize=True), pair)
    yield Case(
        "Dot, normalize, large",
        lambda: layers.Dot(1, normalize=True),
        lambda: [[normal(3, 64, scale=300), normal(3, 64, scale=300, seed=1)]],
    )
    yield Case(
        "Dot, normalize, small",
        lambda: layers.Dot(1, normalize=True),
        lambda: [[normal(3, 64, scale=1e-4), normal(3, 64, scale=1e-4, seed=1)]],
    )
    yield Case(
        "Dot, normalize, zeros",
        lambda: layers.Dot(1, normalize=True),
        lambda: [[full(0, 3, 4), normal(3, 4)]],
    )


def _normalization():
    image = lambda: [normal(8, 4, 4, 6)]  # noqa: E731
    tokens = lambda: [normal(4, 6, 32)]  # noqa: E731
    yield Case(
        "BatchNormalization",
        lambda: layers.BatchNormalization(),
        image,
        training,
    )
    yield Case(
        "BatchNormalization, inference",
        lambda: layers.BatchNormalization(),
        image,
        lambda: {"training": False},
    )
    yield Case(
        "BatchNormalization, large",
        lambda: layers.BatchNormalization(),
        lambda: [normal(8, 4, 4, 6, scale=2000)],
        training,
    )
    yield Case(
        "BatchNormalization, small",
        lambda: layers.BatchNormalization(epsilon=1e-12),
        lambda: [normal(8, 4, 4, 6, scale=1e-3)],
        training,
    )
    yield Case(
        "BatchNormalization, zeros",
        lambda: layers.BatchNormalization(epsilon=1e-8),
        lambda: [full(0, 8, 4, 4, 6)],
        training,
    )
    yield Case(
        "BatchNormalization, mask",
        lambda: layers.BatchNormalization(),
        lambda: [normal(8, 6, 4)],
        lambda: {"training": True, "mask": lengths(8, 6, 6, 5, 4, 3, 2, 1, 6, 2)},
    )
    yield Case(
        "BatchNormalization, a batch of 80000, mask",
        lambda: layers.BatchNormalization(),
        lambda: [normal(2, 40000, 2)],
        lambda: {"training": True, "mask": np.ones((2, 40000), bool)},
    )
    for cls, options in (
        ("LayerNormalization", {}),
        ("RMSNormalization", {}),
        ("GroupNormalization", {"groups": 4}),
    ):
        build = functools.partial(getattr(layers, cls), **options)
        yield Case(cls, build, tokens)
        yield Case(cls + ", large", build, lambda: [normal(4, 6, 32, scale=2000)])
        yield Case(
            cls + ", small",
            lambda build=build: build(epsilon=1e-12),
            lambda: [normal(4, 6, 32, scale=1e-4)],
        )
        yield Case(
            cls + ", zeros",
            lambda build=build: build(epsilon=1e-8),
            lambda: [full(0, 4, 6, 32)],
        )
    yield Case(
        "LayerNormalization, two axes",
        lambda: layers.LayerNormalization(axis=[1, 2]),
        tokens,
    )
    yield Case(
        "LayerNormalization, 100000 wide",
        lambda: layers.LayerNormalization(),
        lambda: [normal(2, 100000)],
    )
    yield Case("UnitNormalization", lambda: layers.UnitNormalization(), tokens)
    yield Case(
        "UnitNormalization, large",
        lambda: layers.UnitNormalization(),
        lambda: [normal(4, 6, 32, scale=300)],
    )
    yield Case(
        "UnitNormalization, small",
        lambda: layers.UnitNormalization(),
        lambda: [normal(4, 6, 32, scale=1e-4)],
    )
    yield Case(
        "UnitNormalization, zeros",
        lambda: layers.UnitNormalization(),
        lambda: [full(0, 4, 6, 32)],
    )
    yield Case(
        "SpectralNormalization",
        lambda: layers.SpectralNormalization(layers.Dense(6)),
        lambda: [normal(4, 8)],
        training,
    )
    yield Case(
        "SpectralNormalization, large kernel",
        lambda: layers.SpectralNormalization(
            layers.Dense(
                6,
                kernel_initializer=keras.initializers.RandomNormal(stddev=400, seed=0),
            )
        ),
        lambda: [normal(4, 64)],
        training,
    )


def _pooling():
    x = {
        "1D": lambda: [normal(2, 12, 3)],
        "2D": lambda: [normal(2, 8, 8, 3)],
        "3D": lambda: [normal(2, 4, 4, 4, 3)],
    }
    for rank, inputs in x.items():
        for kind in ("Average", "Max"):
            cls = f"{kind}Pooling{rank}"
            yield Case(cls, lambda cls=cls: getattr(layers, cls)(2), inputs)
            yield Case(
                cls + ", same padding",
                lambda cls=cls: getattr(layers, cls)(3, 2, "same"),
                inputs,
            )
            cls = f"Global{kind}Pooling{rank}"
            yield Case(cls, lambda cls=cls: getattr(layers, cls)(), inputs)
            cls = f"Adaptive{kind}Pooling{rank}"
            yield Case(cls, lambda cls=cls: getattr(layers, cls)(2), inputs)
        yield Case(
            f"GlobalAveragePooling{rank}, sum past 65504",
            lambda rank=rank: getattr(layers, f"GlobalAveragePooling{rank}")(),
            lambda inputs=inputs: [full(30000, *inputs()[0].shape)],
        )
        window = {"1D": (256,), "2D": (16, 16), "3D": (7, 7, 7)}[rank]
        yield Case(
            f"AveragePooling{rank}, windows of 256 or more",
            lambda rank=rank, window=window: getattr(layers, f"AveragePooling{rank}")(
                window
            ),
            lambda window=window: [normal(2, *window, 1, scale=0.1, shift=1.5)],
            gradient=False,
        )
        # A window of 2197 to 2304 values of 50: the sum is beyond float16, the average
        # is not. No gradients, because JAX takes a minute to compile them.
        wide = {"1D": (2304,), "2D": (48, 48), "3D": (13, 13, 13)}[rank]
        yield Case(
            f"AveragePooling{rank}, sum past 65504",
            lambda rank=rank, wide=wide: getattr(layers, f"AveragePooling{rank}")(wide),
            lambda wide=wide: [full(50, 1, *wide, 1)],
            gradient=False,
        )
        yield Case(
            f"AdaptiveAveragePooling{rank}, sum past 65504",
            lambda rank=rank: getattr(layers, f"AdaptiveAveragePooling{rank}")(1),
            lambda wide=wide: [full(50, 1, *wide, 1)],
            gradient=False,
        )
    yield Case(
        "GlobalAveragePooling1D, mask",
        lambda: layers.GlobalAveragePooling1D(),
        lambda: [normal(3, 12, 4)],
        lambda: {"mask": lengths(3, 12, 12, 5, 1)},
    )
    yield Case(
        "GlobalAveragePooling1D, mask, 3000 steps",
        lambda: layers.GlobalAveragePooling1D(),
        lambda: [normal(3, 3000, 2, shift=1)],
        lambda: {"mask": lengths(3, 3000, 2999, 2101, 3)},
    )
    yield Case(
        "GlobalAveragePooling1D, mask, sum past 65504",
        lambda: layers.GlobalAveragePooling1D(),
        lambda: [full(200, 2, 600, 2)],
        lambda: {"mask": lengths(2, 600, 600, 500)},
    )
    yield Case(
        "GlobalAveragePooling1D, mask, 70000 steps",
        lambda: layers.GlobalAveragePooling1D(),
        lambda: [full(0.5, 1, 70000, 1)],
        lambda: {"mask": lengths(1, 70000, 69000)},
    )
    yield Case(
        "GlobalAveragePooling1D, 70000 steps",
        lambda: layers.GlobalAveragePooling1D(),
        lambda: [full(0.5, 1, 70000, 1)],
    )
    yield Case(
        "GlobalAveragePooling2D, 72900 pixels",
        lambda: layers.GlobalAveragePooling2D(),
        lambda: [full(0.5, 1, 270, 270, 1)],
    )
    yield Case(
        "AveragePooling1D, windows of 4096",
        lambda: layers.AveragePooling1D(4096),
        lambda: [normal(1, 4096, 1, scale=0.1, shift=1)],
        # JAX takes a minute to compile it.
        backends=("tensorflow", "torch"),
    )


def _convolution():
    x = {
        "1D": lambda: [normal(2, 12, 4)],
        "2D": lambda: [normal(2, 8, 8, 4)],
        "3D": lambda: [normal(2, 4, 4, 4, 4)],
    }
    for rank, inputs in x.items():
        yield Case(
            f"Conv{rank}",
            lambda rank=rank: getattr(layers, f"Conv{rank}")(6, 3),
            inputs,
        )
        yield Case(
            f"Conv{rank}, strides, same padding",
            lambda rank=rank: getattr(layers, f"Conv{rank}")(6, 3, 2, "same"),
            inputs,
        )
        yield Case(
            f"Conv{rank}Transpose",
            lambda rank=rank: getattr(layers, f"Conv{rank}Transpose")(6, 3, 2, "same"),
            inputs,
        )
        if rank != "3D":
            yield Case(
                f"DepthwiseConv{rank}",
                lambda rank=rank: getattr(layers, f"DepthwiseConv{rank}")(
                    3, depth_multiplier=2
                ),
                inputs,
            )
            yield Case(
                f"SeparableConv{rank}",
                lambda rank=rank: getattr(layers, f"SeparableConv{rank}")(6, 3),
                inputs,
            )
    for rank in ("1D", "2D"):
        yield Case(
            f"Conv{rank}, dilated",
            lambda rank=rank: getattr(layers, f"Conv{rank}")(6, 3, dilation_rate=2),
            x[rank],
        )
        yield Case(
            f"Conv{rank}, groups",
            lambda rank=rank: getattr(layers, f"Conv{rank}")(6, 3, groups=2),
            x[rank],
        )
    yield Case(
        "Conv1D, causal",
        lambda: layers.Conv1D(6, 3, padding="causal"),
        x["1D"],
    )
    yield Case(
        "Conv2D, large pictures",
        lambda: layers.Conv2D(2, 3),
        lambda: [normal(4, 64, 64, 2)],
    )


def _recurrent():
    x = lambda: [normal(3, 7, 4)]  # noqa: E731
    options = {"return_sequences": True}
    for cls in ("SimpleRNN", "LSTM", "GRU"):
        yield Case(cls, lambda cls=cls: getattr(layers, cls)(5, **options), x)
        yield Case(
            cls + ", mask",
            lambda cls=cls: getattr(layers, cls)(5),
            x,
            lambda: {"mask": lengths(3, 7, 7, 4, 1)},
        )
        yield Case(
            cls + ", unrolled",
            lambda cls=cls: getattr(layers, cls)(5, unroll=True, return_state=True),
            x,
        )
        yield Case(
            cls + "Cell",
            lambda cls=cls: getattr(layers, cls + "Cell")(5),
            lambda cls=cls: [
                normal(3, 4),
                [normal(3, 5, seed=i) for i in range(1 + (cls == "LSTM"))],
            ],
        )
        yield Case(
            f"RNN, {cls}Cell",
            lambda cls=cls: layers.RNN(getattr(layers, cls + "Cell")(5), **options),
            x,
        )
    yield Case(
        "LSTM, 300 steps",
        lambda: layers.LSTM(4),
        lambda: [normal(2, 300, 3)],
    )
    yield Case(
        "LSTM, cell state past 2048",
        _counting_lstm,
        lambda: [full(1, 2, 3000, 1)],
        gradient=False,
    )
    yield Case(
        "GRU, reset before",
        lambda: layers.GRU(5, reset_after=False, **options),
        x,
    )
    yield Case(
        "StackedRNNCells",
        lambda: layers.StackedRNNCells([layers.LSTMCell(5), layers.GRUCell(3)]),
        lambda: [normal(3, 4), [[normal(3, 5), normal(3, 5, seed=1)], [normal(3, 3)]]],
    )
    yield Case(
        "RNN, StackedRNNCells",
        lambda: layers.RNN(
            layers.StackedRNNCells([layers.LSTMCell(5), layers.GRUCell(3)])
        ),
        x,
    )
    yield Case(
        "Bidirectional",
        lambda: layers.Bidirectional(layers.LSTM(5, **options)),
        x,
    )
    yield Case(
        "TimeDistributed",
        lambda: layers.TimeDistributed(layers.Dense(5)),
        x,
    )
    for rank, shape in (
        ("1D", (2, 3, 8, 2)),
        ("2D", (2, 3, 6, 6, 2)),
        ("3D", (2, 3, 4, 4, 4, 2)),
    ):
        yield Case(
            f"ConvLSTM{rank}",
            lambda rank=rank: getattr(layers, f"ConvLSTM{rank}")(3, 3),
            lambda shape=shape: [normal(*shape)],
        )


def _counting_lstm():
    """Gates held open: the cell state grows by one a step."""
    return layers.LSTM(
        3,
        kernel_initializer="ones",
        recurrent_initializer="zeros",
        bias_initializer=keras.initializers.Constant(20.0),
        unit_forget_bias=False,
        return_state=True,
    )


def _regularization():
    x = lambda: [normal(64, 32, shift=2)]  # noqa: E731
    yield Case(
        "ActivityRegularization",
        lambda: layers.ActivityRegularization(0.01, 0.01),
        x,
    )
    yield Case(
        "ActivityRegularization, squares past 65504",
        lambda: layers.ActivityRegularization(0.0, 1e-6),
        lambda: [normal(64, 32, scale=30)],
    )
    yield Case(
        "Dense, activity_regularizer",
        lambda: layers.Dense(5, activity_regularizer=keras.regularizers.L2(0.01)),
        lambda: [normal(4, 8)],
    )
    yield Case(
        "Dense, kernel_regularizer",
        lambda: layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.01)),
        lambda: [normal(4, 8)],
    )
    for cls in ("Dropout", "AlphaDropout", "GaussianDropout", "GaussianNoise"):
        yield Case(
            cls,
            lambda cls=cls: getattr(layers, cls)(0.3, seed=1),
            x,
            training,
            random_draws=64 * 8,
        )
    for rank, shape in (
        ("1D", (64, 4, 8)),
        ("2D", (64, 2, 2, 8)),
        ("3D", (64, 2, 2, 2, 8)),
    ):
        yield Case(
            f"SpatialDropout{rank}",
            lambda rank=rank: getattr(layers, f"SpatialDropout{rank}")(0.3, seed=1),
            lambda shape=shape: [normal(*shape, shift=2)],
            training,
            random_draws=64 * 8,
        )


def _reshaping():
    line, picture, volume = (
        (lambda: [normal(2, 6, 3)]),
        (lambda: [normal(2, 6, 4, 3)]),
        (lambda: [normal(2, 4, 4, 4, 3)]),
    )
    for rank, inputs in (("1D", line), ("2D", picture), ("3D", volume)):
        for cls in (f"Cropping{rank}", f"ZeroPadding{rank}"):
            yield Case(cls, lambda cls=cls: getattr(layers, cls)(1), inputs)
        cls = f"UpSampling{rank}"
        yield Case(cls, lambda cls=cls: getattr(layers, cls)(2), inputs)
    for method in ("bilinear", "bicubic", "lanczos3"):
        yield Case(
            f"UpSampling2D, {method}",
            lambda method=method: layers.UpSampling2D(2, interpolation=method),
            picture,
            backends=NO_LANCZOS if method == "lanczos3" else ALL,
        )
    yield Case("Flatten", lambda: layers.Flatten(), line)
    yield Case("Permute", lambda: layers.Permute((2, 1)), line)
    yield Case("RepeatVector", lambda: layers.RepeatVector(3), lambda: [normal(2, 4)])
    yield Case("Reshape", lambda: layers.Reshape((3, 6)), line)


def _numbers():
    """Preprocessing of numbers and categories."""
    yield Case(
        "Normalization",
        lambda: layers.Normalization(),
        lambda: [normal(32, 4)],
        adapt=lambda: normal(32, 4),
    )

    def raw():
        noise = np.random.default_rng(0).standard_normal((32, 4))
        return (1e5 + 1e3 * noise).astype("float32")

    yield Case(
        "Normalization, raw inputs near 1e5",
        lambda: layers.Normalization(),
        lambda: [raw()],
        adapt=raw,
    )

    def years():
        since = np.random.default_rng(0).uniform(0, 25, (32, 4))
        return (2000 + since).astype("float32")

    yield Case(
        "Normalization, raw inputs near 2000",
        lambda: layers.Normalization(),
        lambda: [years()],
        adapt=years,
    )
    yield Case(
        "Normalization, given mean and variance of 1e6",
        lambda: layers.Normalization(mean=500.0, variance=1e6),
        lambda: [normal(32, 4, scale=1000, shift=500)],
    )
    yield Case(
        "Normalization, small inputs",
        lambda: layers.Normalization(),
        lambda: [normal(32, 4, scale=1e-5)],
        adapt=lambda: normal(32, 4, scale=1e-5),
    )
    yield Case(
        "Rescaling", lambda: layers.Rescaling(1 / 255), lambda: [images(2, 8, 8, 3)]
    )
    yield Case(
        "Rescaling, raw inputs near 1e5",
        lambda: layers.Rescaling(1e-5, -1.0),
        lambda: [raw()],
    )
    steps = np.linspace(2000, 2002, 40, dtype="float32").reshape(8, 5)
    for mode in ("int", "one_hot"):
        yield Case(
            f"Discretization, {mode}",
            lambda mode=mode: layers.Discretization(
                [2000.5, 2001.0, 2001.5], output_mode=mode
            ),
            lambda mode=mode: [steps[:, : 5 if mode == "int" else 1]],
            gradient=False,
        )
    yield Case(
        "Discretization, boundaries near 1e5",
        lambda: layers.Discretization(
            [1e5, 100010.0, 100020.0], output_mode="multi_hot"
        ),
        lambda: [np.linspace(99990, 100030, 40, dtype="float32").reshape(8, 5)],
        gradient=False,
    )
    ids = lambda: [integers(4, 3, low=2050, high=3000)]  # noqa: E731
    for mode in ("multi_hot", "one_hot", "count"):
        yield Case(
            f"CategoryEncoding, {mode}",
            lambda mode=mode: layers.CategoryEncoding(3000, mode),
            ids,
            gradient=False,
        )
        yield Case(
            f"CategoryEncoding, {mode}, ids as floats",
            lambda mode=mode: layers.CategoryEncoding(3000, mode),
            lambda: [ids()[0].astype("float32")],
            gradient=False,
        )
    yield Case(
        "CategoryEncoding, count, one id 3000 times",
        lambda: layers.CategoryEncoding(4, "count"),
        lambda: [np.ones((2, 3001), "int32")],
        gradient=False,
    )
    yield Case(
        "CategoryEncoding, count, weights",
        lambda: layers.CategoryEncoding(30, "count"),
        lambda: [integers(4, 3, high=30)],
        lambda: {"count_weights": normal(4, 3)},
        gradient=False,
    )
    yield Case(
        "Hashing",
        lambda: layers.Hashing(5000),
        lambda: [integers(4, 3, high=10**6)],
        gradient=False,
    )
    yield Case(
        "Hashing, one_hot",
        lambda: layers.Hashing(50, output_mode="one_hot"),
        lambda: [integers(4, 1, high=10**6)],
        gradient=False,
    )
    yield Case(
        "HashedCrossing",
        lambda: layers.HashedCrossing(5000),
        lambda: [[integers(4, 1, high=10**6), integers(4, 1, high=10**6, seed=1)]],
        gradient=False,
    )
    yield Case(
        "HashedCrossing, one_hot",
        lambda: layers.HashedCrossing(50, output_mode="one_hot"),
        lambda: [[integers(4, 1, high=10**6), integers(4, 1, high=10**6, seed=1)]],
        gradient=False,
    )
    yield Case(
        "IntegerLookup",
        lambda: layers.IntegerLookup(vocabulary=list(range(2000, 6000))),
        lambda: [integers(4, 3, low=1990, high=6010)],
        gradient=False,
    )
    yield Case(
        "IntegerLookup, multi_hot",
        lambda: layers.IntegerLookup(vocabulary=[3, 5, 4097], output_mode="multi_hot"),
        lambda: [np.array([[3, 5], [4096, 4097]])],
        gradient=False,
    )
    words = lambda: [np.array([["earth", "wind"], ["and", "fire"]])]  # noqa: E731
    yield Case(
        "StringLookup",
        lambda: layers.StringLookup(vocabulary=["earth", "wind", "fire"]),
        words,
        gradient=False,
    )
    yield Case(
        "StringLookup, tf_idf",
        lambda: layers.StringLookup(
            vocabulary=["earth", "wind", "fire"],
            idf_weights=[0.3, 0.7, 1.1],
            output_mode="tf_idf",
        ),
        words,
        gradient=False,
    )
    text = lambda: [np.array(["earth wind and fire", "fire"])]  # noqa: E731
    yield Case(
        "TextVectorization",
        lambda: layers.TextVectorization(vocabulary=["earth", "wind", "fire"]),
        text,
        gradient=False,
    )
    yield Case(
        "TextVectorization, tf_idf",
        lambda: layers.TextVectorization(
            vocabulary=["earth", "wind", "fire"],
            idf_weights=[0.3, 0.7, 1.1],
            output_mode="tf_idf",
        ),
        text,
        gradient=False,
    )


def _sound():

    def wave(scale=1.0):
        noise = np.random.default_rng(0).standard_normal((2, 2000))
        return exact(scale * (np.sin(np.arange(2000) / 7) + 0.3 * noise))

    for mode in ("log", "magnitude", "psd", "real", "imag", "angle", "stft"):
        yield Case(
            f"STFTSpectrogram, {mode}",
            lambda mode=mode: layers.STFTSpectrogram(mode=mode, frame_length=64),
            lambda: [wave()[..., None]],
        )
    yield Case(
        "STFTSpectrogram, frames of 1024",
        lambda: layers.STFTSpectrogram(mode="magnitude", frame_length=1024),
        lambda: [wave()[..., None]],
    )
    yield Case(
        "STFTSpectrogram, samples of 16 bits",
        lambda: layers.STFTSpectrogram(mode="psd", frame_length=64),
        lambda: [wave(10000)[..., None]],
    )
    for decibel in (True, False):
        yield Case(
            "MelSpectrogram" if decibel else "MelSpectrogram, power",
            lambda decibel=decibel: layers.MelSpectrogram(
                256, 128, num_mel_bins=16, power_to_db=decibel
            ),
            lambda: [wave()],
        )


def _pictures():
    """Image preprocessing and augmentation."""
    x = lambda: [images(4, 16, 16, 3)]  # noqa: E731
    for cls, options in PICTURES.items():
        random = cls.startswith(("Rand", "MixUp", "CutMix", "AugMix", "Solar"))
        build = functools.partial(getattr(layers, cls), **options)
        yield Case(
            cls,
            functools.partial(build, seed=3) if random else build,
            x,
            training,
            gradient=cls in ("CenterCrop", "Resizing"),
            random_draws=4 if random else 0,
        )
    for method in ("nearest", "bicubic", "lanczos5", "area"):
        yield Case(
            f"Resizing, {method}",
            lambda method=method: layers.Resizing(7, 10, method),
            x,
            backends={"area": ("tensorflow",), "lanczos5": NO_LANCZOS}.get(method, ALL),
            gradient=method != "area",  # TensorFlow has no gradient for it.
        )
    yield Case(
        "Resizing, of 4000 pixels",
        lambda: layers.Resizing(8, 3000),
        lambda: [images(1, 8, 4000, 1)],
        gradient=False,
    )
    yield Case(
        "MaxNumBoundingBoxes",
        lambda: layers.MaxNumBoundingBoxes(4, bounding_box_format="xyxy"),
        lambda: [{"images": images(2, 16, 16, 3), "bounding_boxes": _boxes()}],
        gradient=False,
    )
    yield Case(
        "RandomFlip, boxes on 3000 pixels",
        lambda: layers.RandomFlip("horizontal", seed=3, bounding_box_format="xyxy"),
        lambda: [{"images": images(2, 8, 3000, 1), "bounding_boxes": _boxes(100)}],
        training,
        gradient=False,
    )
    yield Case(
        "Pipeline",
        lambda: layers.Pipeline([layers.Rescaling(1 / 255), layers.CenterCrop(8, 8)]),
        x,
        gradient=False,
    )


def _boxes(scale=1):
    return {
        "boxes": scale * np.array([[[1, 2, 9, 12], [3.5, 1, 13, 10]]] * 2, "float32"),
        "labels": np.array([[0, 1]] * 2, "int32"),
    }


PICTURES: dict[str, dict[str, Any]] = {
    "AugMix": {"num_chains": 1, "chain_depth": 1},
    "AutoContrast": {},
    "CenterCrop": {"height": 8, "width": 8},
    "ContrastLimitedAdaptiveHistogramEqualization": {"tile_grid_size": (2, 2)},
    "CutMix": {},
    "Equalization": {"bins": 16},
    "MixUp": {},
    "RandAugment": {"num_ops": 1},
    "RandomBrightness": {"factor": 0.3},
    "RandomColorDegeneration": {"factor": 0.5},
    "RandomColorJitter": {
        "brightness_factor": 0.3,
        "contrast_factor": 0.3,
        "saturation_factor": 0.3,
        "hue_factor": 0.3,
    },
    "RandomContrast": {"factor": 0.3},
    "RandomCrop": {"height": 8, "width": 8},
    "RandomElasticTransform": {},
    "RandomErasing": {},
    "RandomFlip": {},
    "RandomGaussianBlur": {},
    "RandomGrayscale": {},
    "RandomHue": {"factor": 0.3},
    "RandomInvert": {},
    "RandomPerspective": {},
    "RandomPosterization": {"factor": 4},
    "RandomRotation": {"factor": 0.2},
    "RandomSaturation": {"factor": 0.5},
    "RandomSharpness": {"factor": 0.5},
    "RandomShear": {"x_factor": 0.3, "y_factor": 0.3},
    "RandomTranslation": {"height_factor": 0.3, "width_factor": 0.3},
    "RandomZoom": {"height_factor": 0.3},
    "Resizing": {"height": 7, "width": 10},
    "Solarization": {"threshold_factor": 0.5},
}


def _native():
    """Layers round another framework's model."""
    yield Case("JaxLayer", _jax_layer, lambda: [normal(4, 8)], backends=("jax",))
    yield Case(
        "TorchModuleWrapper",
        _torch_layer,
        lambda: [normal(4, 8)],
        backends=("torch",),
    )


def _jax_layer():
    import jax

    return layers.JaxLayer(
        lambda params, inputs: inputs @ params["w"],
        init_fn=lambda rng, inputs: {
            "w": jax.random.normal(rng, (inputs.shape[-1], 5))
        },
        seed=0,
    )


def _torch_layer():
    import torch

    torch.manual_seed(0)
    return layers.TorchModuleWrapper(torch.nn.Linear(8, 5))


CASES: list[Case] = [
    case
    for family in (
        _activations,
        _core,
        _attention,
        _merging,
        _normalization,
        _pooling,
        _convolution,
        _recurrent,
        _regularization,
        _reshaping,
        _numbers,
        _sound,
        _pictures,
        _native,
    )
    for case in family()
]


def cases(backend: str) -> list[Case]:
    """The cases that exist on a backend."""
    return [case for case in CASES if backend in case.backends]
