"""torch's fully sharded data parallelism (FSDP2) for Keras' variables.

torch's `fully_shard` changes which tensor is a parameter of a module: the whole while
the module computes, this process's shard otherwise. Keras' variables hold their own
tensor, and do not notice. So a module of ours owns the parameters of a layer, and hands
each to its variable when torch sets it.

Source: PyTorch, `torch.distributed.fsdp.fully_shard`.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from torch import distributed

import keras_mp.keras_private as private
from keras_mp.backends.leaves import leaves
from keras_mp.backends.torch.private import is_view
from keras_mp.types import Layer, Model, Tensor, Variable, Variables

if distributed.is_available():
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate
else:

    class DTensor(torch.Tensor):  # type: ignore[no-redef]
        """Nothing is a DTensor if torch is built without `distributed`."""


# The shards, by the id of their variable: a weight, or an optimizer's slot.
_shards: dict[int, DTensor] = {}
# The models that are sharded; `in` alone reads it.
_models: weakref.WeakSet = weakref.WeakSet()


class Owner(torch.nn.Module):
    """Owns the parameters of a layer, whose `forward` goes through this module.

    Args:
        variables: Keras variables of one dtype.
        call: computes with them.
        within: the owners that `call` goes through in turn.
    """

    def __init__(
        self, variables: Variables, call: Callable, within: Sequence["Owner"]
    ) -> None:
        super().__init__()
        self.variables: dict[str, Any] = {}
        self.call = call
        self.within = torch.nn.ModuleList(within)
        for number, variable in enumerate(variables):
            name = f"weight_{number}"
            self.register_parameter(name, private.raw_value(variable))
            self.variables[name] = variable

    def __setattr__(self, name: str, value: Tensor) -> None:
        super().__setattr__(name, value)
        variable = vars(self).get("variables", {}).get(name)
        if variable is not None:
            _give(variable, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _without_views(self.call(*args, **kwargs))


def fully_shard(
    model: Model, groups: Sequence[tuple[Any, Sequence[Any]]], mesh: Any
) -> None:
    _check(model, mesh)
    if mesh is None:
        device = private.raw_value(model.variables[0]).device.type
        mesh = init_device_mesh(device, (distributed.get_world_size(),))
    for variable in model.variables:
        _take_from_first(private.raw_value(variable).data, mesh)
    parameters = [private.raw_value(v) for _, own in groups for v in own if v.shape]
    owners: list[Owner] = []
    for layer, variables in groups:
        alike: dict[str, list[Any]] = {}
        for variable in variables:
            if variable.shape:
                alike.setdefault(private.stored_dtype(variable), []).append(variable)
            else:
                mean = functools.partial(_mean, mesh=mesh)
                private.raw_value(variable).register_hook(mean)
        call, within = layer.forward, owners if layer is model else []
        for same_dtype in alike.values() or [[]]:
            # torch needs one dtype for each, so an owner may hold another one.
            call = Owner(same_dtype, call, within)
            fsdp.fully_shard(call, mesh=mesh)
            within = [call]
        owners.append(call)
        layer.forward = _unless_symbolic(layer.forward, call)
    _begin_at(owners[-1])
    for whole in parameters:
        # Frees memory that others still hold, such as an older graph of a Sequential.
        whole.data = whole.data.new_empty(0)
    # The graph of a Sequential is a torch module but not a layer; its layers are not
    # modules of it.
    for layer in {*private.layers_in(model), *model.modules()}:
        if isinstance(layer, keras.layers.Layer):
            for variable in layer.variables:
                if variable.path in layer.torch_params:
                    layer.torch_params[variable.path] = private.raw_value(variable)
    _models.add(model)


def _begin_at(root: Owner) -> None:
    """Calls a model's owner once, with nothing to compute.

    From then on torch takes it as the root, even if a layer is called without it.
    """
    call, root.call = root.call, lambda: None
    root()
    root.call = call
    root.reshard()  # type: ignore[operator]  # torch has made it an FSDPModule.


def _without_views(x: Tensor) -> Any:
    """What a layer returned, with copies of views.

    torch adds a hook to the output, which gathers the weights for the gradient. An
    in-place operation on a view would drop the hook silently.
    """
    if isinstance(x, torch.Tensor):
        return x.clone() if is_view(x) else x
    if type(x) in (list, tuple):
        return type(x)(map(_without_views, x))
    if type(x) is dict:
        return {key: _without_views(value) for key, value in x.items()}
    return x


def shards_in_vain(layer: Layer) -> bool:
    return distributed.is_available() and isinstance(layer, fsdp.FSDPModule)


def _check(model: Model, mesh: Any) -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "`fully_shard` needs processes that know each other. Start the script with "
            "`torchrun`, and call `torch.distributed.init_process_group()` first."
        )
    if model in _models:
        raise ValueError(
            "`model` must not be sharded yet. Received: a second call for model "
            f"{model.name!r}."
        )
    dimensions = mesh.ndim if isinstance(mesh, DeviceMesh) else 0
    named = dimensions == 2 and mesh.mesh_dim_names
    if mesh is not None and not (dimensions == 1 or named):
        raise ValueError(
            "`mesh` must be a DeviceMesh of torch with one dimension, or with two that "
            "have names, the first for copies and the second for shards. Received: "
            f"mesh={mesh!r}."
        )


def _unless_symbolic(original: Callable, owner: Owner) -> Callable:
    """Calls a layer through its owner, which gathers its weights from all processes.

    Calls it directly if Keras only asks for shapes: a process may do that alone.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [*leaves((args, kwargs))]
        if any(isinstance(x, keras.KerasTensor) for x in given) or any(
            isinstance(x, torch.Tensor) and x.is_meta for x in given
        ):
            return original(*args, **kwargs)
        return owner(*args, **kwargs)

    return forward


def _take_from_first(value: torch.Tensor, mesh: Any) -> None:
    """Gives a tensor the values that it has in the first process of a mesh."""
    for dimension in range(mesh.ndim):
        group = mesh.get_group(dimension)
        first = distributed.get_global_rank(group, 0)
        distributed.broadcast(value, first, group)


def _mean(grad: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The mean of a scalar's gradient over all processes: a scalar has no shards."""
    grad = grad.clone()
    for dimension in range(mesh.ndim):
        distributed.all_reduce(grad, group=mesh.get_group(dimension))
    return grad / mesh.size()


def _give(variable: Variable, value: torch.Tensor) -> None:
    private.set_raw_value(variable, value)
    if isinstance(value, DTensor):
        if id(variable) not in _shards:
            weakref.finalize(variable, _shards.pop, id(variable), None)
        _shards[id(variable)] = value


def shard_like(reference: Any, variable: Variable) -> None:
    shard = _shards.get(id(reference))
    if shard is not None and variable.shape == reference.shape:
        value = _part_of(private.raw_value(variable).data, shard)
        _give(variable, torch.nn.Parameter(value, requires_grad=False))


def _part_of(value: torch.Tensor, shard: DTensor) -> torch.Tensor:
    """Splits a tensor that each process holds whole as another one is sharded."""
    if isinstance(value, DTensor):
        return value
    everywhere = [Replicate()] * shard.device_mesh.ndim
    whole = DTensor.from_local(value, shard.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=shard.placements)


def write(variable: Variable, value: Tensor) -> bool:
    """Writes if the variable or the value is sharded; returns False if neither is."""
    shard, raw = _shards.get(id(variable)), private.raw_value(variable)
    if shard is None and not isinstance(value, DTensor):
        return False
    with torch.no_grad():
        if shard is not None:
            shard.copy_(_part_of(value, shard))
        if raw is not shard:  # Not sharded, or gathered by a forward pass.
            raw.copy_(_whole(value))
    return True


def among_shards(variables: Variables) -> contextlib.AbstractContextManager:
    if not _shards or not any(id(v) in _shards for v in variables):
        return contextlib.nullcontext()
    whole = [v for v in variables if v.shape and id(v) not in _shards]
    if whole:
        raise ValueError(
            "`trainable_variables` must all be sharded, or none of them. Received: "
            f"{whole[0].name!r}, which is not, among sharded ones. Create all weights "
            "before `keras_mp.fully_shard(model)`, those of `enable_lora` too."
        )
    # Keras does not load it: imported here, so that nobody else waits for it.
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


def local(x: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that this process holds; other tensors unchanged."""
    if not isinstance(x, DTensor):
        return x
    is_sum = any(isinstance(p, Partial) for p in x.placements)
    return x.full_tensor() if is_sum else x.to_local()


def on_own_part(
    function: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """Applies an elementwise function to the part of a tensor in this process.

    It also gets the number of the shard, from 1; 0 for a tensor without shards.
    """
    if not isinstance(x, DTensor):
        return function(x, 0)
    mesh, placements = x.device_mesh, x.placements
    part = function(x.to_local(), 1 + mesh.get_local_rank(mesh.ndim - 1))
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def _whole(x: Tensor) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def converted_whole(original: Callable) -> Callable:
    """Makes Keras' `convert_to_numpy` gather sharded tensors; all processes call it."""

    @functools.wraps(original)
    def convert_to_numpy(x: Tensor) -> Any:
        return original(_whole(x))

    return convert_to_numpy


def read_whole(original: Callable) -> Callable:
    """The same for `np.array(variable)`, which `variable.numpy()` calls."""

    @functools.wraps(original)
    def __array__(self: Any, dtype: Any = None) -> Any:
        value = self.value if _shards else None
        if not isinstance(value, DTensor):
            return original(self, dtype)
        array = private.backend_core.convert_to_numpy(value)
        return array.astype(dtype) if dtype else array

    return __array__


def write_file(model: Model, write: Callable[[], Any]) -> Any:
    if model not in _models:
        return write()
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer else ())]
    is_first = distributed.get_rank() == 0
    whole = {}
    for variable in variables:
        shard = private.raw_value(variable)
        if isinstance(shard, DTensor):
            value = shard.full_tensor()
            if is_first:
                whole[id(variable)] = variable, shard, value.cpu()
    try:
        for variable, _, value in whole.values():
            private.set_raw_value(variable, value)
        return write() if is_first else None
    finally:
        for variable, shard, _ in whole.values():
            private.set_raw_value(variable, shard)
        distributed.barrier()
