"""The only place that imports a framework.

`engine` is the module for the backend Keras runs on. Each engine has the same fifteen
functions:

    is_tracing()                      inside a function being compiled?
    compiled(results, static)         one program, or kernel, of a few small tensors
    outside_trace()                   where variables are given their first values
    refuse_baking(what, remedy)       error where a variable's value would be frozen
    check_strategy(variables, built)  error where replicas would not agree
    optimizer_scope(model)            where its optimizer's variables are created
    unscale(grads, inverse, ...)      float32 gradients; on torch in place where they
                                      are the `.grad` of given variables
    nonfinite_to_nan(grads)                     what is not finite becomes nan
    nonfinite(grads)                  a code for each: an infinity, a nan, neither
    all_finite(codes)                 one bool scalar
    update_if(finite, update, ...)    run `update(grads)`, of no effect if not finite;
                                      a function says what it writes, if that is
                                      known; where Python decides in every case, on
                                      torch, returns whether it did
    make_train_function(...)          Keras' own, its `train_step` wrapped
    build(model, data)                build a model that its first train step would
    undo_skipped(model, opt, step)    a train step of no effect where it is skipped
    optimizer_values(args)            the optimizer's state where `fit` passes it round
"""

import importlib
import types

import keras

ENGINES = ("jax", "tensorflow", "torch")


def _import_engine() -> types.ModuleType:
    name = keras.backend.backend()
    if name not in ENGINES:
        raise ImportError(
            "keras_mp trains on the backends jax, tensorflow and torch. Received: "
            f"KERAS_BACKEND={name}. Set the environment variable KERAS_BACKEND."
        )
    return importlib.import_module(f"keras_mp.backends.{name}.engine")


engine = _import_engine()
