"""The networks in torch alone, trained with `torch.amp` as its documentation does."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.kernels.peers import Decoder


def _mlp(width: int, depth: int) -> nn.Module:
    layers = [nn.Linear(width, width) for _ in range(depth)]
    hidden = [part for layer in layers[:-1] for part in (layer, nn.ReLU())]
    return nn.Sequential(*hidden, layers[-1])


def _of_torchvision(name: str) -> Callable[..., nn.Module]:
    def make(classes: int, **_: int) -> nn.Module:
        import torchvision

        model = getattr(torchvision.models, name)(num_classes=classes)
        return model.to(memory_format=torch.channels_last)

    return make


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": _mlp,
    "decoder": Decoder,
    "vit": _of_torchvision("vit_b_16"),
    "resnet50": _of_torchvision("resnet50"),
}
"""Name of the case -> its sizes -> the network. Only the real sizes: torchvision has no
small ones."""


class AmpTrainer:
    """Steps with `torch.autocast`, `GradScaler` and torch's fused Adam.

    Args:
        model: a network of torch.
        x, y: a batch, NumPy arrays; y holds classes, or vectors of float32.
    """

    first_steps = 0

    def __init__(self, model: nn.Module, x: np.ndarray, y: np.ndarray) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.to(self._device).train()
        self._optimizer = torch.optim.Adam(model.parameters(), 1e-5, fused=True)
        self._scaler = torch.amp.GradScaler(self._device)
        self._x, self._y = (torch.tensor(part, device=self._device) for part in (x, y))
        if x.ndim == 4:
            self._x = self._x.contiguous(memory_format=torch.channels_last)
        self._of_classes = not self._y.is_floating_point()

    @property
    def resident_bytes(self) -> int:
        """The bytes of the state, which do not depend on the batch."""
        slots = [x for of in self._optimizer.state.values() for x in of.values()]
        state = [*self._model.state_dict().values(), *slots]
        return sum(x.numel() * x.element_size() for x in state)

    def run(self, steps: int) -> None:
        """Takes steps, and waits only for the last one."""
        for _ in range(steps):
            self._optimizer.zero_grad()
            with torch.autocast(self._device, torch.float16):
                loss = self._loss(self._model(self._x))
            self._scaler.scale(loss).backward()
            self._scaler.step(self._optimizer)
            self._scaler.update()
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _loss(self, outputs: torch.Tensor) -> torch.Tensor:
        if self._of_classes:
            logits = outputs.flatten(0, -2)
            return functional.cross_entropy(logits, self._y.long().flatten())
        return functional.mse_loss(outputs, self._y)

    @property
    def skipped_steps(self) -> None:
        """`GradScaler` counts none."""
