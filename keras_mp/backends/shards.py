"""What a backend does if several processes share the weights of a model."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_mp.types import Layer, Model, Variable, Variables


class Shards:
    """Each process holds all weights whole, as on every backend but torch."""

    def fully_shard(
        self, model: Model, groups: Sequence[tuple[Any, Sequence[Any]]], mesh: Any
    ) -> None:
        """Shards the weights of a built model over the processes of a mesh, on torch.

        Args:
            model: its weights are not sharded yet.
            groups: layers that hold no layer of another group, each with the weights
                that are gathered while it computes; the last is the model itself.
            mesh: a torch `DeviceMesh`, or None for all processes.
        """
        raise ValueError(
            "`fully_shard` is for the backend torch. Received: backend="
            f"{keras.backend.backend()!r}. On JAX, `keras.distribution.ModelParallel` "
            "shards the weights of a model."
        )

    shards = False
    """May weights be sharded, by torch's own `fully_shard` or by ours?

    Both need processes that know each other.
    """

    def shards_in_vain(self, layer: Layer) -> bool:
        """Was torch's own `fully_shard` called on a layer? Its variables stay whole."""
        return False

    def shard_like(self, reference: Any, variable: Variable) -> None:
        """Shards an optimizer's new variable like its weight, if that is sharded."""
        return

    def among_shards(self, variables: Variables) -> contextlib.AbstractContextManager:
        """A context in which an optimizer updates variables, sharded or not.

        In it, shards may be combined with tensors that each process holds whole.

        Raises:
            ValueError: if some of the variables are sharded, and others are not.
        """
        return contextlib.nullcontext()

    def write_file(self, model: Model, write: Callable[[], Any]) -> Any:
        """Calls `write`, which reads a model's variables.

        If the model is sharded, all processes gather it, and only the first one writes.
        """
        return write()
