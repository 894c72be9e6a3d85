"""What each layer of the sweep's models computes in: `make sweep-dtypes`.

It traces a train step of each model on JAX, without running it, in seconds a model.
Compare the files that it writes before and after a change to what every model passes
through: they show each layer that has moved to another dtype, and each product whose
operands have.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

RESULTS = {
    "mixed_float16": pathlib.Path(__file__).with_name("layer_dtypes.txt"),
    "bfloat16": pathlib.Path(__file__).with_name("layer_dtypes_bfloat16.txt"),
}
# The smallest model of each family: the others have more of the same layers.
FAMILIES = (
    "ConvNeXtTiny",
    "DenseNet121",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "InceptionResNetV2",
    "InceptionV3",
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Small",
    "NASNetMobile",
    "ResNet50",
    "ResNet50V2",
    "VGG16",
    "Xception",
)
HEAD = """\
What each layer computes in after a train step under {policy}, on JAX, and the
operands of the step's products. Written by `make sweep-dtypes`. Layers of one class
that are alike share a line, unless they compute in float32 for another rule than one
about their class.
"""


def main() -> None:
    os.environ["KERAS_BACKEND"] = "jax"
    from sweeps.model_cases import cases

    names = {f"applications/{name}" for name in FAMILIES}
    wanted = [c for c in cases() if c.name in names or c.name.startswith("hub/")]
    for policy, path in RESULTS.items():
        parts = [HEAD.format(policy=policy)]
        for case in wanted:
            parts.append("\n".join([case.name, *_lines(case, policy)]) + "\n")
            print(policy, case.name, flush=True)
        path.write_text("\n".join(parts))


def _lines(case: Any, policy: str) -> Iterator[str]:
    import keras

    import keras_mp
    from sweeps.model_cases import inputs, training
    from tests.products import products_of

    keras.utils.clear_session(free_memory=False)
    keras_mp.set_global_policy(policy)
    try:
        model = case.build(None)
        x = inputs(model, case.batch)
        loss, y = training(model, x, case.loss)
        model.compile("sgd", **loss)
        model.optimizer.build(model.trainable_variables)
        products = products_of(model, x, y)
    finally:
        keras_mp.set_global_policy("float32")
    counts: dict[str, int] = {}
    for layer in keras_mp.inspect(model).layers:
        if layer.compute_dtype is None:
            continue
        name = f"{layer.class_name}: {layer.compute_dtype}"
        if layer.variable_dtype != "float32":
            name = f"{name}, weights {layer.variable_dtype}"
        if layer.decided_by == layer.class_name:  # A rule about its class.
            name = f"{name} ({layer.decided_by})"
        elif layer.compute_dtype == "float32":
            name = f"{name}, {layer.path} ({layer.decided_by})"
        counts[name] = counts.get(name, 0) + 1
    for name in sorted(counts):
        yield f"  {name}" + (f" x {counts[name]}" if counts[name] > 1 else "")
    for operands in sorted(products):
        yield f"  products of {operands}: {products[operands]}"


if __name__ == "__main__":
    main()
