"""What `find_float32_layers` has found, in text and a table."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from keras_mp.policies.policy import ChoosingPolicy, Policy
from keras_mp.tables import Table
from keras_mp.tools.float32_search.agreement import ANY, Error


@dataclasses.dataclass(frozen=True)
class Contribution:
    """What one layer in float32 contributes.

    Attributes:
        path: the layer's path.
        without: the worst error while this layer alone is back in half precision.
    """

    path: str
    without: Error


@dataclasses.dataclass(frozen=True, repr=False)
class Float32Layers:
    """The layers that have to be in float32; prints as text, with a table.

    Attributes:
        model: the model's name.
        policy: "mixed_float16", "mixed_bfloat16" or "bfloat16".
        scale: the loss scale at which gradients were compared.
        candidates: the number of layers to choose from.
        contributions: one for each chosen layer.
        before: the worst error with none of them in float32.
        after: the worst error with all of them in float32.
        undetermined: outputs and gradients that were not compared, as rounding the
            weights alone changes them by more than half.
    """

    model: str
    policy: str
    scale: float
    candidates: int
    contributions: tuple[Contribution, ...]
    before: Error
    after: Error
    undetermined: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the layers."""
        return tuple(c.path for c in self.contributions)

    @property
    def agrees(self) -> bool:
        """Do all outputs and gradients agree with these layers in float32?"""
        return self.after.agrees

    @property
    def float32_policy(self) -> ChoosingPolicy:
        """The policy that keeps them in float32."""
        kind: Any = type(Policy(self.policy))
        return kind(float32=[re.escape(p) for p in self.paths])

    @property
    def sentences(self) -> list[str]:
        """What was found, as sentences."""
        sentences = [*self._found()]
        if count := len(self.undetermined):
            sentences.append(
                f"{count} of the outputs and gradients were checked for inf and nan "
                "only: they are 0, or rounding the weights alone changes them by more "
                "than half."
            )
        return sentences

    def _found(self) -> Iterator[str]:
        if not self.agrees:
            yield (
                f"No choice of layers is enough: with all {self.candidates} in float32 "
                f"{_text(self.after)}. The cause is outside of layers, in the `call` "
                "of the model itself or in its loss."
            )
            return
        if not self.paths:
            yield (
                "No layer has to be in float32: all outputs and gradients agree; "
                f"{_text(self.before)}."
            )
            return
        count = len(self.paths)
        yield (
            f"{count} of {self.candidates} layers {'has' if count == 1 else 'have'} to "
            f"be in float32. Without {'it' if count == 1 else 'them'} "
            f"{_text(self.before)}; with {'it' if count == 1 else 'them'}, "
            f"{_text(self.after)}."
        )
        yield f"keras_mp.{self.float32_policy!r}"

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, for JSON."""
        return {
            "model": self.model,
            "policy": self.policy,
            "loss_scale": self.scale,
            "candidates": self.candidates,
            "sentences": self.sentences,
            "agrees": self.agrees,
            "float32": list(self.paths),
            "contributions": [
                {"path": c.path, "without": _json(c.without)}
                for c in self.contributions
            ],
            "before": _json(self.before),
            "after": _json(self.after),
            "undetermined": list(self.undetermined),
        }

    def table(self) -> Table:
        """A row for each layer in float32: the worst error without it."""
        return Table(
            ("layer in float32", "without it, worst off", "error", "allowed"),
            [
                (c.path, c.without.name, _percent(c.without.error), _allowed(c.without))
                for c in self.contributions
            ],
            f"{self.model}: {self.policy}, loss scale {self.scale:g}",
            [f"- {sentence}" for sentence in self.sentences],
        )

    def __str__(self) -> str:
        return self.table().text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table().html()


def _text(error: Error) -> str:
    if error.error == float("inf"):
        return f"{error.name} is not finite"
    return (
        f"the worst is {error.name}, {_percent(error.error)} off (allowed: "
        f"{_allowed(error)})"
    )


def _percent(share: float) -> str:
    return "not finite" if share == float("inf") else f"{100 * share:.3g} %"


def _allowed(error: Error) -> str:
    return "all finite" if error.allowed == ANY else _percent(error.allowed)


def _json(error: Error) -> dict[str, Any]:
    share = None if error.error == float("inf") else error.error
    return {"name": error.name, "error": share, "allowed": error.allowed}
