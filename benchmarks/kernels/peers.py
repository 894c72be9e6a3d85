"""The networks of the suite in torch alone, for `torch.amp`."""

import torch
from torch import nn
from torch.nn import functional


class Convolutions(nn.Module):
    """Convolutions with BatchNormalization; images to logits."""

    def __init__(self, depth: int, filters: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(depth):
            channels = filters if index else 3
            layers.append(nn.Conv2d(channels, filters, 3, padding=1, bias=False))
            layers.append(nn.BatchNorm2d(filters, eps=1e-3, momentum=0.01))
            layers.append(nn.ReLU())
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(filters, classes)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.movedim(-1, 1)).mean((2, 3)))


class Decoder(nn.Module):
    """A causal transformer: ids to logits, as `benchmarks.models.decoder`."""

    def __init__(
        self, vocabulary: int, length: int, width: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.projections = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *inputs, output = self.projections
        y = self.norms[0](x)
        q, k, v = (p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in inputs)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + output(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))
