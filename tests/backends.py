"""What tests ask of a backend: its name, gradients of a function, compiled steps."""

import functools
import warnings

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp import installing

BACKEND = keras.backend.backend()
POLICIES = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


def dtype_of(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def computes(model):
    return [layer.compute_dtype for layer in model.layers]


def values(variables):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def told(call):
    """What a call returns, and what it says of mixed dtypes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    said = [str(w.message) for w in caught]
    return result, [message for message in said if "mixes dtypes" in message]


def state_of(model):
    """All but the loss scale and its counters, which a skipped step moves."""
    return values([*model.variables, *model.optimizer.inner_optimizer.variables])


def without_us(function):
    """What a function returns while the seams are out of Keras."""
    installing.uninstall()
    try:
        return function()
    finally:
        installing.install()


def same_bits(before, after):
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(before, after, strict=True)
    )


def stateful_step(optimizer, variables, compiled):
    """A function of gradients that applies them to `variables`, in a mode of COMPILED.

    It takes the loss, before it was scaled, as a second argument; only an optimizer
    that scales is told of it.
    """
    scales = isinstance(optimizer, keras_mp.LossScaleOptimizer)

    def told(loss):
        return {"loss": loss} if scales else {}

    if BACKEND == "tensorflow" and compiled:
        import tensorflow as tf

        if compiled == "xla":
            optimizer.build(variables)  # XLA's functions create no variables.
        function = tf.function(
            lambda grads, loss: optimizer.apply(grads, variables, **told(loss)),
            jit_compile=compiled == "xla",
        )
        return lambda grads, loss=1.0: function(tensors(grads), tf.constant(loss))
    if BACKEND == "jax" and compiled:
        import jax

        optimizer.build(variables)
        function = jax.jit(
            lambda state, grads, trainable, loss: optimizer.stateless_apply(
                state, grads, trainable, **told(loss)
            )
        )

        def step(grads, loss=1.0):
            trainable, state = function(
                [v.value for v in optimizer.variables],
                tensors(grads),
                [v.value for v in variables],
                loss,
            )
            for variable, value in zip(variables, trainable, strict=True):
                variable.assign(value)
            for variable, value in zip(optimizer.variables, state, strict=True):
                variable.assign(value)

        return step
    return lambda grads, loss=1.0: optimizer.apply(
        tensors(grads), variables, **told(loss)
    )


def tensors(grads):
    """Tensors of arrays; None stays None, and a sparse gradient what it is."""
    return [
        keras.ops.convert_to_tensor(g) if isinstance(g, np.ndarray | np.generic) else g
        for g in grads
    ]


class Chained(keras.Model):
    """A subclassed model: layers one after another, which no config can hold."""

    def __init__(self, parts, **kwargs):
        super().__init__(**kwargs)
        self.parts = parts

    def call(self, x):
        for layer in self.parts:
            x = layer(x)
        return x


class Batches(keras.utils.PyDataset):
    """Serves these batches."""

    def __init__(self, *batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def batches_of(*arrays, size):
    """Arrays in batches of a size, in their order."""
    starts = range(0, len(arrays[0]), size)
    return [tuple(a[start : start + size] for a in arrays) for start in starts]


def loader(*arrays, size):
    """A DataLoader of torch."""
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(*map(torch.tensor, arrays))
    return torch.utils.data.DataLoader(dataset, batch_size=size)


def tf_data(*arrays, size):
    """A Dataset of TensorFlow."""
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size)


COMPILED = {"jax": [False, True], "tensorflow": [False, True, "xla"]}.get(
    BACKEND, [False]
)


def graphs_within(graph):
    """A TensorFlow graph and those of its branches, theirs included."""
    yield graph
    for op in graph.get_operations():
        for attribute in op.node_def.attr.values():
            if attribute.HasField("func"):
                yield from graphs_within(graph._get_function(attribute.func.name).graph)


def gradients(loss_fn, variables):
    """Gradients of `loss_fn()` with respect to Keras variables, eagerly.

    On JAX they are taken through a StatelessScope.
    """
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_fn()
        return tape.gradient(loss, [v.value for v in variables])
    if BACKEND == "torch":
        import torch

        return list(torch.autograd.grad(loss_fn(), [v.value for v in variables]))
    import jax

    def stateless(trainable):
        with keras.StatelessScope(list(zip(variables, trainable, strict=True))):
            return loss_fn()

    return jax.grad(stateless)([v.value for v in variables])


# The framework's own softmax, as an activation.
if BACKEND == "tensorflow":
    import tensorflow as tf

    native_softmax = tf.nn.softmax
elif BACKEND == "jax":
    import jax

    native_softmax = jax.nn.softmax
else:
    import torch

    native_softmax = functools.partial(torch.softmax, dim=-1)


# Models with a train step of their own. Two flavours: as the official guides "customize
# fit()" have it, which never call scale_loss, and with the loss scaled.


def guide_model():
    """A model class with the `train_step` of Keras' guide for this backend."""
    return _custom_model(scaled=False)


def scaling_model():
    """The same with the loss scaled, as Keras' own train steps do."""
    return _custom_model(scaled=True)


def _custom_model(scaled):
    if BACKEND == "tensorflow":

        class CustomModel(keras.Model):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    y_pred = self(x, training=True)
                    loss = self.compute_loss(y=y, y_pred=y_pred)
                    if scaled:
                        loss = self.optimizer.scale_loss(loss)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply(gradients, self.trainable_variables)
                for metric in self.metrics:
                    if metric.name == "loss":
                        metric.update_state(self.compute_loss(y=y, y_pred=y_pred))
                    else:
                        metric.update_state(y, y_pred)
                return {m.name: m.result() for m in self.metrics}

    elif BACKEND == "jax":

        class CustomModel(keras.Model):
            def compute_loss_and_updates(
                self, trainable, non_trainable, x, y, optimizer_variables
            ):
                y_pred, non_trainable = self.stateless_call(
                    trainable, non_trainable, x, training=True
                )
                loss = self.compute_loss(x, y, y_pred)
                scaled_loss = loss
                if scaled:
                    scaled_loss = self.optimizer.stateless_scale_loss(
                        optimizer_variables, loss
                    )
                return scaled_loss, (loss, y_pred, non_trainable)

            def train_step(self, state, data):
                trainable, non_trainable, optimizer_variables, metrics = state
                x, y = data
                grad_fn = jax.value_and_grad(
                    self.compute_loss_and_updates, has_aux=True
                )
                (_, (loss, y_pred, non_trainable)), grads = grad_fn(
                    trainable, non_trainable, x, y, optimizer_variables
                )
                trainable, optimizer_variables = self.optimizer.stateless_apply(
                    optimizer_variables, grads, trainable
                )
                new_metrics, logs = [], {}
                for metric in self.metrics:
                    this = metrics[
                        len(new_metrics) : len(new_metrics) + len(metric.variables)
                    ]
                    if metric.name == "loss":
                        this = metric.stateless_update_state(this, loss)
                    else:
                        this = metric.stateless_update_state(this, y, y_pred)
                    logs[metric.name] = metric.stateless_result(this)
                    new_metrics += this
                return logs, (
                    trainable,
                    non_trainable,
                    optimizer_variables,
                    new_metrics,
                )

    else:

        class CustomModel(keras.Model):
            def train_step(self, data):
                x, y = data
                self.zero_grad()
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
                if scaled:
                    loss = self.optimizer.scale_loss(loss)
                loss.backward()
                trainable_weights = list(self.trainable_weights)
                gradients = [v.value.grad for v in trainable_weights]
                with torch.no_grad():
                    self.optimizer.apply(gradients, trainable_weights)
                for metric in self.metrics:
                    if metric.name == "loss":
                        metric.update_state(self.compute_loss(y=y, y_pred=y_pred))
                    else:
                        metric.update_state(y, y_pred)
                return {m.name: m.result() for m in self.metrics}

    return CustomModel
