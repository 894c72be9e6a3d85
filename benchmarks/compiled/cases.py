"""The models of the suite `compiled`, with the batches that they train on."""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from benchmarks.models import decoder, dense, vision_transformer

VOCABULARY, LENGTH, WIDTH, HEADS = 50257, 512, 768, 12


class Case(NamedTuple):
    """A model and its batch.

    Attributes:
        title: the model, its size and its batch, for tables.
        build: makes the model.
        batch: examples.
        inputs: shape and dtype of one example, or of each input by its name.
        target: the same of one target; integers are classes.
        depth: of a decoder that is also written by hand.
        devices: names of the devices that it is compiled for.
        options: those of XLA.
        package: what it needs besides Keras.
        own_losses: whether its `compile` knows its losses.
    """

    title: str
    build: Callable[[], Any]
    batch: int
    inputs: Any
    target: Any
    depth: int = 0
    devices: tuple[str, ...] = ("H100", "TPU v5e")
    options: tuple[tuple[str, Any], ...] = ()
    package: str = "keras"
    own_losses: bool = False

    @property
    def is_possible(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def is_compiled(self, device: str, backend: str) -> bool:
        """Is it in the suite, for a device of that name, with that backend?"""
        if device not in self.devices:
            return False
        # JAX's steps are enough of KerasHub's models, and for a TPU.
        return backend == "jax" or device == "H100" and self.package == "keras"

    def compile(self, model: Any, optimizer: Any) -> None:
        if self.own_losses:
            model.compile(optimizer)
            return
        sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        loss = sparse if self.target[1] == "int32" else "mse"
        model.compile(optimizer, loss, metrics=[])

    def data(self) -> tuple[Any, Any]:
        """A batch of zeros: (x, y)."""

        def zeros(specs: Any) -> Any:
            if isinstance(specs, dict):
                return {name: zeros(spec) for name, spec in specs.items()}
            shape, dtype = specs
            return np.zeros((self.batch, *shape), dtype)

        return zeros(self.inputs), zeros(self.target)


IDS, IMAGES = ((LENGTH,), "int32"), ((224, 224, 3), "float32")
CLASS = ((), "int32")
# XLA tries Triton's tiles on the GPU; without one it takes some that do not fit the 197
# rows of ViT or the channels of SegFormer, and fails. With this option cuBLAS makes all
# products, under every policy.
NO_TRITON = (("xla_gpu_enable_triton_gemm", False),)


def _decoder(depth: int, batch: int, *devices: str) -> Case:
    return Case(
        f"decoder, {depth} x {WIDTH}, vocabulary {VOCABULARY}, {batch} x {LENGTH}",
        lambda: decoder(VOCABULARY, LENGTH, WIDTH, depth, HEADS),
        *(batch, IDS, IDS, depth, devices),
    )


def _language_model(name: str, **options: Any) -> Any:
    import keras_hub

    backbone = getattr(keras_hub.models, f"{name}Backbone")(num_layers=2, **options)
    task = getattr(keras_hub.models, f"{name}CausalLM")
    return task(backbone=backbone, preprocessor=None)


def _seq2seq() -> Any:
    import keras_hub

    backbone = keras_hub.models.T5Backbone(
        vocabulary_size=32128,
        num_layers=2,
        num_heads=12,
        hidden_dim=768,
        intermediate_dim=3072,
    )
    return keras_hub.models.T5Seq2SeqLM(backbone=backbone, preprocessor=None)


def _segmenter() -> Any:
    import keras_hub

    encoder = keras_hub.models.MiTBackbone(
        image_shape=(512, 512, 3),
        hidden_dims=[32, 64, 160, 256],
        num_layers=4,
        layerwise_depths=[2, 2, 2, 2],
        layerwise_num_heads=[1, 2, 5, 8],
        layerwise_sr_ratios=[8, 4, 2, 1],
        layerwise_patch_sizes=[7, 3, 3, 3],
        layerwise_strides=[4, 2, 2, 2],
        max_drop_path_rate=0.1,
    )
    backbone = keras_hub.models.SegFormerBackbone(
        image_encoder=encoder, projection_filters=256
    )
    return keras_hub.models.SegFormerImageSegmenter(
        backbone=backbone, num_classes=150, preprocessor=None
    )


def _detector() -> Any:
    import keras_hub

    encoder = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 128, 256, 512],
        stackwise_num_blocks=[3, 4, 6, 3],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="bottleneck_block",
        image_shape=(512, 512, 3),
    )
    backbone = keras_hub.models.RetinaNetBackbone(
        encoder, 3, 7, use_p5=False, image_shape=(512, 512, 3)
    )
    return keras_hub.models.RetinaNetObjectDetector(backbone, 80, preprocessor=None)


def _classifier(name: str) -> Any:
    import keras_hub

    sizes = {"vocabulary_size": 50265 if name == "RobertaText" else 30522}
    backbone = getattr(keras_hub.models, f"{name.removesuffix('Text')}Backbone")(
        **sizes, num_layers=2, num_heads=12, hidden_dim=768, intermediate_dim=3072
    )
    task = getattr(keras_hub.models, f"{name}Classifier")
    return task(backbone=backbone, num_classes=2, preprocessor=None)


_PARTS = "encoder", "decoder"
_OF_HUB = {"token_ids": IDS, "padding_mask": ((LENGTH,), "bool")}


def _of_hub(title: str, build: Callable[[], Any], inputs: Any, target: Any) -> Case:
    title = f"KerasHub's {title}, 2 layers, 8 x {LENGTH}"
    devices = ("H100",)
    return Case(title, build, 8, inputs, target, devices=devices, package="keras_hub")


CASES = {
    "decoder": _decoder(4, 8, "H100"),
    "decoder, batch 32": _decoder(4, 32, "H100"),
    "small decoder": _decoder(2, 8, "TPU v5e"),
    "ViT": Case(
        "ViT, 2 x 768, 32 images of 224 x 224",
        lambda: vision_transformer(224, 16, WIDTH, 2, HEADS, 1000),
        *(32, IMAGES, CLASS),
        options=NO_TRITON,
    ),
    "ResNet-50": Case(
        "ResNet-50, 32 images of 224 x 224",
        lambda: keras.applications.ResNet50(weights=None, classifier_activation=None),
        *(32, IMAGES, CLASS),
    ),
    "VGG-16": Case(
        "VGG-16, 32 images of 224 x 224",
        lambda: keras.applications.VGG16(weights=None, classifier_activation=None),
        *(32, IMAGES, CLASS),
    ),
    "MLP": Case(
        "MLP, 4 x 4096, 4096 examples",
        lambda: dense(4096, 4),
        *(4096, ((4096,), "float32"), ((4096,), "float32")),
    ),
    "GPT-2": _of_hub(
        "GPT2CausalLM",
        lambda: _language_model(
            "GPT2",
            vocabulary_size=50257,
            num_heads=12,
            hidden_dim=768,
            intermediate_dim=3072,
            max_sequence_length=1024,
        ),
        *(_OF_HUB, IDS),
    ),
    "Llama": _of_hub(
        "LlamaCausalLM",
        lambda: _language_model(
            "Llama",
            vocabulary_size=32000,
            num_query_heads=32,
            num_key_value_heads=8,
            hidden_dim=2048,
            intermediate_dim=5632,
        ),
        *(_OF_HUB, IDS),
    ),
    "Gemma": _of_hub(
        "GemmaCausalLM",
        lambda: _language_model(
            "Gemma",
            vocabulary_size=256000,
            num_query_heads=8,
            num_key_value_heads=1,
            hidden_dim=2048,
            intermediate_dim=32768,
            head_dim=256,
        ),
        *(_OF_HUB, IDS),
    ),
    "T5": _of_hub(
        "T5Seq2SeqLM",
        _seq2seq,
        {f"{part}_{name}": spec for part in _PARTS for name, spec in _OF_HUB.items()},
        IDS,
    ),
    "SegFormer": Case(
        "KerasHub's SegFormerImageSegmenter, B0, 8 images of 512 x 512",
        _segmenter,
        *(8, ((512, 512, 3), "float32"), ((512, 512), "int32")),
        devices=("H100",),
        options=NO_TRITON,
        package="keras_hub",
    ),
    "RetinaNet": Case(
        "KerasHub's RetinaNetObjectDetector, ResNet-50, 8 images of 512 x 512",
        _detector,
        *(8, ((512, 512, 3), "float32")),
        {"boxes": ((20, 4), "float32"), "labels": ((20,), "float32")},
        devices=("H100",),
        options=NO_TRITON,
        package="keras_hub",
        own_losses=True,
    ),
    "BERT": _of_hub(
        "BertTextClassifier",
        lambda: _classifier("BertText"),
        *(_OF_HUB | {"segment_ids": IDS}, CLASS),
    ),
    "RoBERTa": _of_hub(
        "RobertaTextClassifier", lambda: _classifier("RobertaText"), _OF_HUB, CLASS
    ),
}
