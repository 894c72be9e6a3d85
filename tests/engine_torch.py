"""Steps in several processes of torch, printed as JSON; see `processes`.

python engine_torch.py loop|train
"""

import json
import os
import sys

import keras
import torch
from backends import values
from step_sequences import SEQUENCES, WEIGHTS, trace_line
from test_skipped_steps import X, Y, model_under
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import keras_mp


def loop(sequence, reduced):
    """The steps of a sequence: the gradients' mean over all processes, or one's own.

    A process' own gradients are those of the whole step but for the bad values.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    optimizer = keras_mp.LossScaleOptimizer(
        keras.optimizers.SGD(**sequence.inner_options()), **sequence.options()
    )
    variables = [keras.Variable(w) for w in WEIGHTS]
    lines = []
    for index in range(len(sequence.steps)):
        factors = [torch.tensor(g * ranks) for g in sequence.gradients(index, rank, 2)]
        loss = sum((f * v.value).sum() for f, v in zip(factors, variables, strict=True))
        optimizer.scale_loss(loss).backward()
        grads = [v.value.grad for v in variables]
        for grad in grads if reduced else []:
            distributed.all_reduce(grad)
            grad /= ranks
        with torch.no_grad():
            loss = torch.tensor(sequence.loss(index, rank, ranks))
            optimizer.apply(grads, variables, loss=loss)
        for variable in variables:
            variable.value.grad = None
        lines.append(
            trace_line(
                values(optimizer._loss_scaling.variables),
                values([optimizer.iterations])[0],
                values(variables),
            )
        )
    return lines


def batches(poisoned_rank, split):
    """This process' six batches, and one poisoned in one process before two of them."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for index in range(6):
        size = 8 // ranks if split else 8
        start = 8 * index + (rank * size if split else 0)
        x, y = X[start : start + size], Y[start : start + size]
        if poisoned_rank is not None and index in (0, 3):
            bad_x, bad_y = x.copy(), y.copy()
            if rank == poisoned_rank and index == 0:  # The loss is finite.
                bad_y[-1] = 1e6
            elif rank == poisoned_rank:
                bad_x[-1] = float("inf")
            yield bad_x, bad_y
        yield x, y


def parallel(poisoned_rank, model):
    """A loop of one's own round DistributedDataParallel."""
    replica = DistributedDataParallel(model)
    optimizer = model.optimizer
    for x, y in batches(poisoned_rank, split=True):
        replica.zero_grad()
        loss = ((replica(torch.tensor(x), training=True) - torch.tensor(y)) ** 2).mean()
        optimizer.scale_loss(loss).backward()
        variables = model.trainable_variables
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables, loss=loss)
        if distributed.get_rank() == 0:  # As is usual: no other process takes part.
            model.evaluate(X, Y, verbose=0)
    # Statistics are each process' own, and in a loop of one's own nobody undoes them.
    return model.trainable_variables


def fit(poisoned_rank, model):
    """`fit` in every process, of the same batches but for the poisoned samples."""
    steps = 6 if poisoned_rank is None else 8
    model.fit(
        batches(poisoned_rank, split=False),
        steps_per_epoch=steps, verbose=0, shuffle=False,
    )  # fmt: skip
    return model.variables


def trained(train, poisoned_rank, initial_scale):
    model = model_under()
    optimizer = model.optimizer
    optimizer.dynamic_scale.assign(initial_scale)
    kept = train(poisoned_rank, model)
    kept = values([*kept, *optimizer.inner_optimizer.variables])
    return {
        "values": [v.tobytes().hex() for v in kept],
        "scale": float(optimizer.loss_scale),
        "skipped": int(optimizer.skipped_steps),
        "consecutive": int(optimizer.consecutive_skips),
        "nonfinite": len(optimizer.nonfinite_report()),
    }


if __name__ == "__main__":
    distributed.init_process_group(
        "gloo",
        init_method=os.environ["MEETING"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    if sys.argv[1] == "loop":
        result = {
            how: {name: loop(s, how == "reduced") for name, s in SEQUENCES.items()}
            for how in ("reduced", "local")
        }
    else:
        result = {
            train.__name__: {
                # At the scale that the others come to after their first step.
                "clean": trained(train, None, 128.0),
                "first": trained(train, 0, 256.0),
                "last": trained(train, distributed.get_world_size() - 1, 256.0),
            }
            for train in (parallel, fit)
        }
    print(json.dumps(result))
    distributed.destroy_process_group()
