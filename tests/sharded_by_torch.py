"""`fully_shard` in several processes of torch, printed as JSON; see `processes`.

python sharded_by_torch.py PART,PART... FOLDER
"""

import json
import os
import sys
import warnings

import keras
import numpy as np
import torch
from keras import layers
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import keras_mp

optim = keras.optimizers
BATCH, STEPS = 16, 4
_draw = np.random.default_rng(0)
X = _draw.normal(size=(BATCH * STEPS, 16)).astype("float32")
Y = X[:, :10].argmax(1)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SEQUENCES = X.reshape(-1, 4, 4)
TARGETS = X[:, :4]


def classifier(**options):
    """A model whose layers have groups of their own, but for the normalization."""
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(63, "relu", **options),
            layers.LayerNormalization(),
            layers.Dense(64, "gelu"),
            layers.Dense(10),
        ]
    )


class Scale(layers.Layer):
    """Its weight has no dimension to shard."""

    def build(self, input_shape):
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * self.factor


class Transposed(layers.Layer):
    """Reads a weight of another layer."""

    def __init__(self, dense):
        super().__init__()
        self.dense = dense

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.dense.kernel))


class Subclassed(keras.Model):
    """Layers in a list, one that is called again and again, a weight of its own."""

    def __init__(self):
        super().__init__()
        self.shared = layers.Dense(4, "tanh")
        self.blocks = [layers.Dense(4) for _ in range(2)]
        self.out = layers.Dense(4)
        self.weight = self.add_weight(shape=(4,), initializer="ones", name="own")

    def call(self, x):
        for block in self.blocks:
            x = self.shared(block(x))
        return self.out(keras.ops.mean(x * self.weight, axis=1))


def graph():
    """Layers made of layers, a scalar weight, a tied one, regularizers."""
    inputs = keras.Input((4, 4))
    x = inputs + layers.MultiHeadAttention(2, 4)(inputs, inputs)
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
    x = layers.TimeDistributed(layers.Dense(4))(x)
    dense = layers.Dense(5, kernel_regularizer="l2", activity_regularizer="l2")
    x = Transposed(dense)(Scale()(dense(x)))
    x = keras.Sequential([layers.Conv1D(6, 2), layers.GlobalMaxPooling1D()])(x)
    return keras.Model(inputs, layers.Dense(4)(x))


def frozen():
    """A frozen layer, and one that trains by LoRA."""
    inputs = keras.Input((4, 4))
    first, second = layers.Dense(8), layers.Dense(8)
    x = second(first(inputs))
    first.trainable = False
    second.enable_lora(2)
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(x)))


OPTIMIZERS = {
    "Adam": lambda: optim.Adam(0.01),
    "AdamW": lambda: optim.AdamW(0.01, weight_decay=0.1),
    "SGD": lambda: optim.SGD(0.1, momentum=0.9),
    "Lion": lambda: optim.Lion(),
    "Muon": lambda: optim.Muon(),
    "Adafactor": lambda: optim.Adafactor(),
    "Lamb": lambda: optim.Lamb(),
    "clipnorm": lambda: optim.Adam(0.01, clipnorm=0.01),
    "global_clipnorm": lambda: optim.SGD(0.5, global_clipnorm=0.1),
    "use_ema": lambda: optim.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: optim.Adam(0.01, gradient_accumulation_steps=2),
}


def mine(array):
    """This process' part of each batch."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    batches = array.reshape(-1, ranks, BATCH // ranks, *array.shape[1:])
    return batches[:, rank].reshape(-1, *array.shape[1:])


def compiled(build, optimizer, x):
    keras.utils.set_random_seed(1)
    model = build()
    model(x[:2])
    model.compile(optimizer(), LOSS if x is X else "mse")
    return model


def fit(model, x, y, epochs=2):
    """The mean of the losses over all processes; whole batches without shards."""
    sharded = any(is_shard(v) for v in model.weights)
    x, y = (mine(x), mine(y)) if sharded else (x, y)
    size = BATCH // distributed.get_world_size() if sharded else BATCH
    history = model.fit(x, y, size, epochs, shuffle=False, verbose=0).history
    losses = torch.tensor(history["loss"])
    distributed.all_reduce(losses)
    return losses.numpy() / distributed.get_world_size()


def is_shard(variable):
    return hasattr(variable._value, "to_local")


def part(variable):
    value = variable._value
    return (value.to_local() if is_shard(variable) else value).detach()


def furthest(ours, others):
    pairs = zip(ours, others, strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def weights(model):
    return [v.numpy() for v in model.weights]


def beside_one_process(policy, build, optimizer, x=X, y=Y, mesh=None):
    """How far losses, weights and predictions are from one process' own."""
    with keras_mp.policy_scope(policy):
        alone = compiled(build, optimizer, x)
        losses = fit(alone, x, y)
        sharded = compiled(build, optimizer, x)
        assert keras_mp.fully_shard(sharded, mesh) is sharded
        whole = [v.path for v in sharded.weights if not is_shard(v)]
        return {
            "losses": furthest([losses], [fit(sharded, x, y)]),
            "weights": furthest(weights(alone), weights(sharded)),
            "predictions": furthest(
                [alone.predict(x, verbose=0)], [sharded.predict(x, verbose=0)]
            ),
            "whole": whole,
            "kernel": part(sharded.weights[0]).float().tolist(),
        }


def optimizers():
    return {
        name: beside_one_process("float32", classifier, optimizer)
        for name, optimizer in OPTIMIZERS.items()
    }


def models():
    return {
        f"{build.__name__}, {policy}": beside_one_process(
            policy, build, lambda: optim.SGD(0.05), SEQUENCES, TARGETS
        )
        for build in (Subclassed, graph, frozen)
        for policy in ("float32", "mixed_float16")
    }


def policies():
    return {
        policy: beside_one_process(policy, classifier, OPTIMIZERS["Adam"])
        for policy in ("mixed_float16", "mixed_bfloat16", "bfloat16")
    }


def copies():
    """Two copies of the model, each on half of the processes."""
    shape = (2, distributed.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
    return {
        policy: beside_one_process(policy, classifier, OPTIMIZERS["Adam"], mesh=mesh)
        for policy in ("float32", "bfloat16")
    }


def memory():
    """Bytes of this process' weights, gradients and slots, and of all processes'."""
    with keras_mp.policy_scope("mixed_float16"):
        model = keras_mp.fully_shard(compiled(classifier, OPTIMIZERS["Adam"], X))
        fit(model, X, Y, epochs=1)
        model(mine(X)[:4]).sum().backward()
        grads = [v.value.grad for v in model.trainable_weights]
        slots = [v for v in model.optimizer.variables if v.shape]
        slots = [v for v in slots if "nonfinite" not in v.path]
    held = [part(v) for v in (*model.weights, *slots)] + [g.to_local() for g in grads]
    whole = [*model.weights, *slots, *model.trainable_weights]
    return {
        "held": sum(x.nbytes for x in held),
        "whole": sum(4 * int(np.prod(v.shape)) for v in whole),
    }


def skipping():
    """Only one process' shard of a gradient is infinite, in a loop of one's own."""
    with keras_mp.policy_scope("mixed_float16"):
        model = keras_mp.fully_shard(compiled(classifier, OPTIMIZERS["Adam"], X))
        model(X[:2])
        optimizer = keras_mp.LossScaleOptimizer("adam", initial_scale=16384.0)
        variables = model.trainable_variables
        optimizer.build(variables)
    slots = [v for v in optimizer.variables if is_shard(v)]
    found = []
    for bad_rank in (None, distributed.get_world_size() - 1, None):
        before = [part(v).clone() for v in (*variables, *slots)]
        model.zero_grad()
        optimizer.scale_loss(LOSS(mine(Y)[:4], model(mine(X)[:4]))).backward()
        grads = [v.value.grad for v in variables]
        if bad_rank == distributed.get_rank():
            grads[0].to_local()[0, 0] = float("inf")
        with torch.no_grad():
            optimizer.apply(grads, variables)
        after = [part(v) for v in (*variables, *slots)]
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        found.append(
            {
                "scale": float(optimizer.loss_scale),
                "skipped": int(optimizer.skipped_steps),
                "weights stay": all(same[: len(variables)]),
                "slots stay": all(same[len(variables) :]),
            }
        )
    return found


def skipping_in_fit():
    """Two batches of one process are bad; without them everything is as it is."""

    def train(bad):
        with keras_mp.policy_scope("mixed_float16"):
            optimizer = keras_mp.LossScaleOptimizer(
                OPTIMIZERS["Adam"](), initial_scale=128.0, retake_steps=0
            )

            def build():
                model = classifier()
                model.add(layers.BatchNormalization())
                return model

            model = keras_mp.fully_shard(compiled(build, lambda: optimizer, X))
            size = BATCH // distributed.get_world_size()

            def batches():
                for i in range(STEPS):
                    x, y = (a[i * size : (i + 1) * size] for a in (mine(X), mine(Y)))
                    if bad and i in (1, 3):
                        is_bad = distributed.get_rank() == 0
                        yield (x * float("inf") if is_bad else x), y
                    yield x, y

            logs = model.fit(
                batches(), steps_per_epoch=STEPS + 2 * bad, verbose=0, shuffle=False
            ).history
        inner = model.optimizer.inner_optimizer.variables
        values = [part(v).clone() for v in (*model.weights, *inner)]
        return values, logs["loss"], int(model.optimizer.skipped_steps)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It names the steps that were broken.
        (clean, loss, none), (bad, bad_loss, two) = train(0), train(1)
    return {
        "same": [torch.equal(a, b) for a, b in zip(clean, bad, strict=True)],
        "loss": [loss, bad_loss],
        "skipped": [none, two],
    }


def files(folder):
    """Resumes what another number of processes has left, and leaves a file."""
    left = os.path.join(folder, "left.weights.h5")
    whole = os.path.join(folder, f"whole_{distributed.get_world_size()}.keras")
    with keras_mp.policy_scope("mixed_float16"):

        def new():
            return compiled(classifier, OPTIMIZERS["Adam"], X)

        model = keras_mp.fully_shard(new())
        if not os.path.exists(left):
            fit(model, X, Y)
            distributed.barrier()
            model.save_weights(left)
        else:
            model.optimizer.build(model.trainable_variables)
            model.load_weights(left)
        steps = int(model.optimizer.iterations)
        model.save(whole)
        reopened = keras.models.load_model(whole)  # Whole, in each process.
        resharded = keras_mp.fully_shard(keras.models.load_model(whole))
        return {
            "steps": steps,
            "reopened": furthest(weights(reopened), weights(model)),
            "losses": [float(x) for x in fit(model, X, Y)],
            "resharded": [float(x) for x in fit(resharded, X, Y)],
            "slots": [is_shard(v) for v in resharded.optimizer.variables if v.shape],
        }


def told():
    """What is refused, and what torch's own call is answered with."""
    found = {}

    def catch(name, function):
        try:
            function()
        except (TypeError, ValueError) as error:
            found[name] = str(error)

    model = compiled(classifier, OPTIMIZERS["Adam"], X)
    keras_mp.fully_shard(model)
    catch("twice", lambda: keras_mp.fully_shard(model))
    other = compiled(classifier, optim.SGD, X)
    catch("mesh", lambda: keras_mp.fully_shard(other, (2,)))
    catch("layer", lambda: keras_mp.fully_shard(model.layers[0]))
    catch("unbuilt", lambda: keras_mp.fully_shard(Subclassed()))
    model.layers[-1].enable_lora(2)
    model.compile("sgd", "mse")
    catch("late", lambda: model.fit(X, np.zeros((len(X), 10)), verbose=0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = compiled(classifier, OPTIMIZERS["Adam"], X)
        torch.distributed.fsdp.fully_shard(theirs)
        theirs.compile("sgd", "mse")
        theirs.compile("sgd", "mse")
    said = [str(w.message) for w in caught if "keras_mp" in str(w.message)]
    whole = {is_shard(v) for v in theirs.weights}
    return {**found, "theirs": said, "theirs sharded": sorted(whole)}


def interrupted():
    """An exception in the middle of a pass, and the training goes on."""

    class Fails(layers.Layer):
        fail = False

        def call(self, x):
            if self.fail:
                raise RuntimeError("in the middle")
            return x

    fails = Fails()

    def build():
        dense = [layers.Dense(32, "relu"), fails, layers.Dense(10)]
        return keras.Sequential([keras.Input((16,)), *dense])

    model = keras_mp.fully_shard(compiled(build, OPTIMIZERS["Adam"], X))
    model.layers[0](X[:2])  # Alone, and before the model.
    before = weights(model)
    fails.fail = True
    try:
        fit(model, X, Y)
    except RuntimeError as error:
        message = str(error)
    fails.fail = False
    stays = furthest(before, weights(model))
    alone = compiled(build, OPTIMIZERS["Adam"], X)
    return {
        "error": "in the middle" in message,
        "stays": stays,
        "losses": furthest([fit(alone, X, Y)], [fit(model, X, Y)]),
    }


if __name__ == "__main__":
    distributed.init_process_group(
        "gloo",
        init_method=os.environ["MEETING"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    names, folder = sys.argv[1:]
    results = {
        name: files(folder) if name == "files" else globals()[name]()
        for name in names.split(",")
    }
    print(json.dumps(results))
    distributed.destroy_process_group()
