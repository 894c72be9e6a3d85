"""The models of the sweep: all of keras.applications, and KerasHub by configuration."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

BATCH = 2
CLASSES = 5
VOCABULARY = 20
TOKENS = 6

# At 32, the smallest for most, the last feature maps are 1 by 1: with so few values the
# gradients of batch normalisation ruin float32 training as well. Three need more.
SIDE = 64
SMALLEST = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}
# With 2 images their last feature maps have 8 values, whose statistics make predictions
# of 1e5 in float32.
EIGHT = ("EfficientNet", "Inception", "ResNet")


class Case(NamedTuple):
    """One model of the sweep.

    Attributes:
        name: its package and class: "applications/VGG16".
        build: dtype -> model; the dtype is for all layers, None for the global policy.
        loss: the kind of its outputs: "probabilities", "logits", "values" or "boxes".
        batch: how many examples it trains on.
    """

    name: str
    build: Callable[[Any], Any]
    loss: str
    batch: int = BATCH


def cases() -> list[Case]:
    """All models of the sweep."""
    return [*_applications(), *_hub()]


# keras.applications ------------------------------------------------------------------


def architectures() -> list[str]:
    """The names of all architectures that keras.applications exports."""
    exported = _functions(keras.applications)
    modules = [m for _, m in inspect.getmembers(keras.applications, inspect.ismodule)]
    within = {name for module in modules for name in _functions(module)}
    if within - exported:
        raise AssertionError(f"Not exported at the top: {sorted(within - exported)}.")
    return sorted(exported)


def _functions(module: Any) -> set[str]:
    # Architectures are written like classes; `preprocess_input` and the like are not.
    names = (name for name, _ in inspect.getmembers(module, inspect.isfunction))
    return {name for name in names if name[0].isupper()}


def _applications() -> Iterator[Case]:
    for name in architectures():
        build = functools.partial(_application, name)
        batch = 8 if name.startswith(EIGHT) else BATCH
        yield Case(f"applications/{name}", build, "probabilities", batch)


def _application(name: str, dtype: Any) -> Any:
    side = SMALLEST.get(name, SIDE)
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(side, side, 3), classes=CLASSES
    )
    # keras.applications has no `dtype=`: users clone the layers.
    return model if dtype is None else _cloned(model, dtype)


def _cloned(model: Any, dtype: Any) -> Any:
    def clone(layer: Any) -> Any:
        config = layer.get_config()
        # Operations, like `ops.add` in ConvNeXt, are in a graph as layers are.
        is_layer = isinstance(layer, keras.layers.Layer)
        if is_layer and not isinstance(layer, keras.layers.InputLayer):
            config["dtype"] = dtype
        return type(layer).from_config(config)

    return keras.models.clone_model(model, clone_function=clone)


# KerasHub ----------------------------------------------------------------------------


def _hub() -> Iterator[Case]:
    for name, loss in _HUB.items():
        build = functools.partial(_hub_model, name)
        yield Case(f"hub/{name}", build, loss)


def _hub_model(name: str, dtype: Any) -> Any:
    if name.endswith("Backbone"):
        return _backbone(name, dtype=dtype)
    return _TASKS[name](dtype)


def _backbone(name: str, **arguments: Any) -> Any:
    import keras_hub

    made = _PARTS.get(name, lambda dtype: {})(arguments["dtype"])
    configuration = {**_BACKBONES[name], **made, **arguments}
    return getattr(keras_hub.models, name)(**configuration)


def _task(name: str, backbone: str, **arguments: Any) -> Callable[[Any], Any]:
    def build(dtype: Any) -> Any:
        import keras_hub

        return getattr(keras_hub.models, name)(
            backbone=_backbone(backbone, dtype=dtype), preprocessor=None, **arguments
        )

    return build


_TRANSFORMER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
}
_SHORT = {**_TRANSFORMER, "max_sequence_length": TOKENS}
_GROUPED = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 16,
}
_IMAGE = {"image_shape": (32, 32, 3)}

_RESNET = {
    "input_conv_filters": [64],  # KerasHub insists on 64 here and below.
    "input_conv_kernel_sizes": [7],
    "stackwise_num_filters": [64, 64, 64],
    "stackwise_num_blocks": [1, 1, 1],
    "stackwise_num_strides": [1, 2, 2],
    "block_type": "basic_block",
}

_BACKBONES: dict[str, dict[str, Any]] = {
    "AlbertBackbone": {**_SHORT, "embedding_dim": 8},
    "BartBackbone": _SHORT,
    "BertBackbone": _SHORT,
    "DebertaV3Backbone": {**_SHORT, "bucket_size": 4},
    "DistilBertBackbone": _SHORT,
    "GPT2Backbone": _SHORT,
    "RobertaBackbone": _SHORT,
    "OPTBackbone": _SHORT,
    "T5Backbone": _TRANSFORMER,
    "GemmaBackbone": {**_GROUPED, "head_dim": 4},
    "LlamaBackbone": _GROUPED,
    "Qwen3Backbone": {**_GROUPED, "head_dim": 4},
    "WhisperBackbone": {
        **_TRANSFORMER,
        "max_encoder_sequence_length": 2 * TOKENS,
        "max_decoder_sequence_length": TOKENS,
    },
    "ViTBackbone": {
        **_IMAGE,
        "patch_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 8,
        "mlp_dim": 16,
    },
    "ViTDetBackbone": {
        **_IMAGE,
        "patch_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_size": 8,
        "intermediate_dim": 16,
        "global_attention_layer_indices": [1],
        "num_output_channels": 8,
        "window_size": 2,
    },
    "SwinTransformerBackbone": {
        **_IMAGE,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
    "ResNetBackbone": {**_IMAGE, **_RESNET},
    "EfficientNetBackbone": {
        "input_shape": (32, 32, 3),
        "stackwise_width_coefficients": [0.25] * 3,
        "stackwise_depth_coefficients": [1.0] * 3,
        "stackwise_kernel_sizes": [3, 3, 5],
        "stackwise_num_repeats": [1, 2, 1],
        "stackwise_input_filters": [32, 16, 24],
        "stackwise_output_filters": [16, 24, 40],
        "stackwise_expansion_ratios": [1, 6, 6],
        "stackwise_strides": [1, 2, 2],
        "stackwise_squeeze_and_excite_ratios": [0.25] * 3,
        "stackwise_block_types": ["v1", "unfused", "fused"],
    },
    "DenseNetBackbone": {**_IMAGE, "stackwise_num_repeats": [1, 2], "growth_rate": 4},
    "VGGBackbone": {
        **_IMAGE,
        "stackwise_num_repeats": [1, 1],
        "stackwise_num_filters": [8, 8],
    },
    "MiTBackbone": {
        **_IMAGE,
        "layerwise_depths": [1, 1],
        "num_layers": 2,
        "layerwise_num_heads": [1, 2],
        "layerwise_sr_ratios": [2, 1],
        "max_drop_path_rate": 0.1,
        "layerwise_patch_sizes": [7, 3],
        "layerwise_strides": [4, 2],
        "hidden_dims": [8, 16],
    },
    "RetinaNetBackbone": {
        "image_shape": (64, 64, 3),
        "min_level": 3,
        "max_level": 4,
        "use_p5": False,
    },
    "DeepLabV3Backbone": {
        **_IMAGE,
        "spatial_pyramid_pooling_key": "P4",
        "low_level_feature_key": "P2",
        "upsampling_size": 4,
        "dilation_rates": [2, 4],
        "projection_filters": 8,
    },
    "SegFormerBackbone": {"projection_filters": 8},
    "SAMBackbone": {},
    "HGNetV2Backbone": {
        **_IMAGE,
        "stem_channels": [3, 8, 8],
        "stackwise_stage_filters": [[8, 8, 16, 1, 1, 3], [16, 8, 32, 1, 1, 3]],
        "apply_downsample": [False, True],
        "use_lightweight_conv_block": [False, False],
        "depths": [1, 1],
        "hidden_sizes": [16, 32],
        "embedding_size": 8,
        "use_learnable_affine_block": True,
        "hidden_act": "relu",
        "out_features": ["stage1", "stage2"],
    },
    "DFineBackbone": {
        **_IMAGE,
        "decoder_in_channels": [16, 16],
        "encoder_hidden_dim": 16,
        "num_denoising": 10,
        "num_labels": CLASSES,
        "hidden_dim": 16,
        "learn_initial_query": False,
        "num_queries": 10,
        "anchor_image_size": (32, 32),
        "feat_strides": [4, 8],
        "num_feature_levels": 2,
        "encoder_in_channels": [16, 32],
        "encode_proj_layers": [1],
        "num_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "num_encoder_layers": 1,
        "hidden_expansion": 0.5,
        "depth_multiplier": 0.5,
        "eval_idx": -1,
        "num_decoder_layers": 1,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "decoder_n_points": [2, 2],
        "lqe_hidden_dim": 16,
        "num_lqe_layers": 1,
        "out_features": ["stage1", "stage2"],
        "seed": 0,
    },
}


def _sam_parts(dtype: Any) -> dict[str, Any]:
    import keras_hub

    return {
        "image_encoder": _backbone("ViTDetBackbone", dtype=dtype),
        "prompt_encoder": keras_hub.layers.SAMPromptEncoder(
            hidden_size=8,
            image_embedding_size=(2, 2),
            input_image_size=(32, 32),
            mask_in_channels=8,
            dtype=dtype,
        ),
        "mask_decoder": keras_hub.layers.SAMMaskDecoder(
            num_layers=1,
            hidden_size=8,
            intermediate_dim=16,
            num_heads=2,
            embedding_dim=8,
            num_multimask_outputs=3,
            iou_head_depth=2,
            iou_head_hidden_dim=8,
            dtype=dtype,
        ),
    }


# The models within a backbone, which its configuration does not make.
_PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "RetinaNetBackbone": lambda dtype: {
        "image_encoder": _backbone(
            "ResNetBackbone", dtype=dtype, image_shape=(64, 64, 3)
        )
    },
    "DeepLabV3Backbone": lambda dtype: {
        "image_encoder": _backbone("ResNetBackbone", dtype=dtype)
    },
    "SegFormerBackbone": lambda dtype: {
        "image_encoder": _backbone("MiTBackbone", dtype=dtype)
    },
    "DFineBackbone": lambda dtype: {
        "backbone": _backbone("HGNetV2Backbone", dtype=dtype)
    },
    "SAMBackbone": _sam_parts,
}


def _retinanet(dtype: Any) -> Any:
    build = _task("RetinaNetObjectDetector", "RetinaNetBackbone", num_classes=CLASSES)
    model = build(dtype)
    # The head gives the logarithms of the boxes' sizes: with random weights about 100,
    # so that areas are not finite in float32.
    for variable in model.box_head.trainable_variables[-2:]:
        variable.assign(variable / 100)
    return model


_TASKS = {
    "AlbertTextClassifier": _task(
        "AlbertTextClassifier", "AlbertBackbone", num_classes=CLASSES
    ),
    "BartSeq2SeqLM": _task("BartSeq2SeqLM", "BartBackbone"),
    "BertMaskedLM": _task("BertMaskedLM", "BertBackbone"),
    "BertTextClassifier": _task(
        "BertTextClassifier", "BertBackbone", num_classes=CLASSES
    ),
    "DebertaV3TextClassifier": _task(
        "DebertaV3TextClassifier", "DebertaV3Backbone", num_classes=CLASSES
    ),
    "DeepLabV3ImageSegmenter": _task(
        "DeepLabV3ImageSegmenter", "DeepLabV3Backbone", num_classes=CLASSES
    ),
    "DFineObjectDetector": _task(
        "DFineObjectDetector", "DFineBackbone", num_classes=CLASSES
    ),
    "DistilBertTextClassifier": _task(
        "DistilBertTextClassifier", "DistilBertBackbone", num_classes=CLASSES
    ),
    "EfficientNetImageClassifier": _task(
        "EfficientNetImageClassifier",
        "EfficientNetBackbone",
        num_classes=CLASSES,
        activation="softmax",
    ),
    "GemmaCausalLM": _task("GemmaCausalLM", "GemmaBackbone"),
    "GPT2CausalLM": _task("GPT2CausalLM", "GPT2Backbone"),
    "LlamaCausalLM": _task("LlamaCausalLM", "LlamaBackbone"),
    "Qwen3CausalLM": _task("Qwen3CausalLM", "Qwen3Backbone"),
    "ResNetImageClassifier": _task(
        "ResNetImageClassifier",
        "ResNetBackbone",
        num_classes=CLASSES,
        activation="softmax",
    ),
    "RetinaNetObjectDetector": _retinanet,
    "RobertaTextClassifier": _task(
        "RobertaTextClassifier", "RobertaBackbone", num_classes=CLASSES
    ),
    "SAMImageSegmenter": _task("SAMImageSegmenter", "SAMBackbone"),
    "SegFormerImageSegmenter": _task(
        "SegFormerImageSegmenter", "SegFormerBackbone", num_classes=CLASSES
    ),
    "T5Seq2SeqLM": _task("T5Seq2SeqLM", "T5Backbone"),
    "ViTImageClassifier": _task(
        "ViTImageClassifier", "ViTBackbone", num_classes=CLASSES
    ),
}

_LOSSES = {
    "EfficientNetImageClassifier": "probabilities",
    "ResNetImageClassifier": "probabilities",
    "DFineObjectDetector": "boxes",
    "RetinaNetObjectDetector": "boxes",
    "SAMImageSegmenter": "values",
}
# The other backbones of the table above are within tasks.
_ALONE = (
    "BertBackbone",
    "DeepLabV3Backbone",
    "DenseNetBackbone",
    "EfficientNetBackbone",
    "GPT2Backbone",
    "OPTBackbone",
    "ResNetBackbone",
    "RetinaNetBackbone",
    "SwinTransformerBackbone",
    "VGGBackbone",
    "ViTBackbone",
    "WhisperBackbone",
)
_HUB = dict.fromkeys(_ALONE, "values") | {
    name: _LOSSES.get(name, "logits") for name in _TASKS
}


# Data --------------------------------------------------------------------------------


def inputs(model: Any, batch: int = BATCH) -> Any:
    """Random inputs for a batch, as a model's symbolic inputs ask for them."""
    draw = np.random.default_rng(0)
    return keras.tree.map_structure(lambda t: _input(t, batch, draw), model.input)


def _input(tensor: Any, batch: int, draw: np.random.Generator) -> np.ndarray:
    shape = [batch, *(TOKENS if n is None else n for n in tensor.shape[1:])]
    if tensor.name == "masks":  # SAM's: four times as fine as its image's embedding.
        shape[1:4] = 1, 8, 8
    if keras.backend.is_float_dtype(tensor.dtype):
        return draw.random(shape, "float32")
    if "mask_positions" in tensor.name:
        return np.broadcast_to(np.arange(shape[-1]), shape).astype("int32")
    if "mask" in tensor.name:
        return np.ones(shape, "int32")
    top = 2 if "segment" in tensor.name else VOCABULARY
    return draw.integers(0, top, shape, "int32")


def training(model: Any, x: Any, loss: str) -> tuple[dict[str, Any], Any]:
    """The arguments of `compile` about the loss, and the targets for inputs `x`."""
    if loss == "boxes":
        # In a detector's `compile` the loss is a part of it.
        boxes = x.shape[1] * np.array(
            [[0, 0, 0.5, 0.5], [0.25, 0.25, 0.75, 0.75]], "float32"
        )
        return {}, {
            "boxes": np.tile(boxes, (len(x), 1, 1)),
            "labels": np.tile(np.array([1, 3], "int32"), (len(x), 1)),
        }
    symbolic = keras.tree.map_structure(
        lambda a: keras.KerasTensor(a.shape, str(a.dtype)), x
    )
    y = keras.tree.map_structure(
        lambda t: np.zeros(t.shape, "float32"),
        model.compute_output_spec(symbolic),
    )
    if loss == "values":
        return {"loss": "mse", "metrics": []}, y
    crossentropy = keras.losses.SparseCategoricalCrossentropy(
        from_logits=loss == "logits"
    )
    return {"loss": crossentropy, "metrics": []}, y[..., 0].astype("int32")
