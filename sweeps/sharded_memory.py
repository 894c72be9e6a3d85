"""What a process of torch holds of a model that `fully_shard` spreads over processes.

python -m sweeps.sharded_memory
"""

import os
import resource
import socket
from typing import Any

PROCESSES = (1, 2, 4)
# The dense layers of a decoder, 21 million weights.
WIDTH, BLOCKS, BATCH = 512, 8, 16
MEGABYTE = 2**20


def main() -> None:
    """Trains for two steps on 1, 2 and 4 processes, and prints what each holds."""
    from torch import multiprocessing

    from keras_mp.tables import Table

    rows = []
    for count in (0, *PROCESSES):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        results = multiprocessing.get_context("spawn").SimpleQueue()
        multiprocessing.spawn(_train, (count, port, results), max(count, 1))
        held, peak = results.get()
        name = f"{count} processes" if count > 1 else "1 process"
        rows.append((name if count else "not sharded", f"{held:.0f}", f"{peak:.0f}"))
    heading = ("", "weights, gradients, slots (MiB)", "with the step's own (MiB)")
    print(Table(heading, rows).text())


def _train(rank: int, count: int, port: int, results: Any) -> None:
    os.environ |= {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import keras
    import numpy as np
    import torch

    import keras_mp

    torch.set_num_threads(1)
    keras_mp.set_global_policy("mixed_bfloat16")
    if count:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=count)

    def train(width: int) -> tuple[float, float]:
        layers, before = keras.layers, _resident()
        model = keras.Sequential([keras.Input((width,))])
        for _ in range(BLOCKS):
            model.add(layers.Dense(4 * width, "gelu"))
            model.add(layers.Dense(width))
        model.add(layers.Dense(16 * width))
        if count:
            keras_mp.fully_shard(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        x = np.random.default_rng(rank).normal(size=(2 * BATCH, width))
        model.fit(x.astype("float32"), np.arange(len(x)), BATCH, verbose=0)
        tensors = [v.value for v in (*model.weights, *model.optimizer.variables)]
        tensors += [v.value.grad for v in model.trainable_weights]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return sum(map(_bytes, tensors)) / MEGABYTE, peak - before

    train(8)  # From here on, whatever torch loads for a first step is in memory.
    held, peak = train(WIDTH)
    if rank == 0:
        results.put((held, peak))
    if count:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes


def _resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / MEGABYTE


if __name__ == "__main__":
    main()
