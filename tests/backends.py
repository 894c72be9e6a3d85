"""What tests ask of a backend: its name, gradients of a function, compiled steps."""

import keras
import numpy as np

BACKEND = keras.backend.backend()


def values(variables):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def same_bits(before, after):
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(before, after, strict=True)
    )


def stateful_step(optimizer, variables, compiled):
    """A function of gradients that applies them to `variables`, eagerly or compiled."""
    if BACKEND == "tensorflow" and compiled:
        import tensorflow as tf

        function = tf.function(lambda grads: optimizer.apply(grads, variables))
        return lambda grads: function([_tensor(g) for g in grads])
    if BACKEND == "jax" and compiled:
        import jax

        optimizer.build(variables)
        function = jax.jit(optimizer.stateless_apply)

        def step(grads):
            trainable, state = function(
                [v.value for v in optimizer.variables],
                [_tensor(g) for g in grads],
                [v.value for v in variables],
            )
            for variable, value in zip(variables, trainable, strict=True):
                variable.assign(value)
            for variable, value in zip(optimizer.variables, state, strict=True):
                variable.assign(value)

        return step
    return lambda grads: optimizer.apply([_tensor(g) for g in grads], variables)


def _tensor(grad):
    return None if grad is None else keras.ops.convert_to_tensor(grad)


COMPILED = [False] if BACKEND == "torch" else [False, True]


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


def native_softmax(x):
    raise NotImplementedError  # Replaced below by the framework's own function.


if BACKEND == "tensorflow":
    import tensorflow as tf

    native_softmax = tf.nn.softmax
elif BACKEND == "jax":
    import jax

    native_softmax = jax.nn.softmax
else:
    import torch

    native_softmax = torch.softmax
