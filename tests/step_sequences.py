"""Sequences of steps, and what must come of each: one table for every engine.

Weights, gradients and rates are few-bit binary numbers, so that float32 arithmetic is
exact in whatever order an engine adds: a trace must equal the oracle's to the bit.
"""

import dataclasses
from typing import Any

import numpy as np
from oracle import SGD, Accumulating, Clipping, LossScaleOracle, ScaledTraining

# A step each: finite; a gradient with an infinity, with a nan; a nan in loss and
# gradients.
FINITE, INF, NAN, BROKEN = ".", "i", "n", "b"
BAD = {INF: np.inf, NAN: np.nan, BROKEN: np.nan}

WEIGHTS = [
    np.array([[1, 2], [-1, 0.5], [4, 0], [0, -2]], "float32"),
    np.array(3, "float32"),
]


@dataclasses.dataclass(frozen=True)
class StepSequence:
    """Steps of one training, on any number of replicas.

    Args:
        steps: one letter a step.
        bad_replica: the index, as in a list, of the replica that has the bad values.
        scaling: arguments of `LossScaleOptimizer`.
        inner: arguments of the inner `SGD`.
        sparse: the first gradient is sparse, where the engine knows such.
    """

    steps: str
    bad_replica: int = -1
    scaling: dict[str, Any] = dataclasses.field(default_factory=dict)
    inner: dict[str, Any] = dataclasses.field(default_factory=dict)
    sparse: bool = False

    def loss(self, step: int, replica: int = 0, replicas: int = 1) -> float:
        """The loss of one replica, unscaled."""
        bad = self._is_bad(replica, replicas) and self.steps[step] == BROKEN
        return float("nan") if bad else 1.0

    def gradients(
        self, step: int, replica: int = 0, replicas: int = 1
    ) -> list[np.ndarray]:
        """The gradients of one replica, unscaled; their sum over all is the step's."""
        rows = np.zeros_like(WEIGHTS[0])
        for index, row in zip(self.indices(step), self.rows(step), strict=True):
            rows[index] += row
        grads = [rows, np.array(1 + step % 4, "float32")]
        grads = [g / np.float32(replicas) for g in grads]
        if self.steps[step] in BAD and self._is_bad(replica, replicas):
            grads[0][self.indices(step)[0], 1] = BAD[self.steps[step]]
        return grads

    def sparse_gradient(
        self, step: int, replica: int = 0, replicas: int = 1
    ) -> tuple[np.ndarray, list[int]]:
        """The first of `gradients` as rows and their indices, one of them twice."""
        rows = self.rows(step) / np.float32(replicas)
        if self.steps[step] in BAD and self._is_bad(replica, replicas):
            rows[0, 1] = BAD[self.steps[step]]
        return rows, self.indices(step)

    def indices(self, step: int) -> list[int]:
        return [step % 4, (step + 1) % 4, step % 4]

    def rows(self, step: int) -> np.ndarray:
        return np.array([[1, -2], [4, 1], [-2, 8]], "float32") * 2.0 ** -(step % 3)

    def _is_bad(self, replica: int, replicas: int) -> bool:
        return replica == range(replicas)[self.bad_replica]

    def options(self) -> dict[str, Any]:
        """Arguments of `LossScaleOptimizer`: the scale moves within a few steps."""
        return {"initial_scale": 1024.0, "dynamic_growth_steps": 3, **self.scaling}

    def inner_options(self) -> dict[str, Any]:
        """Arguments of the inner `SGD`."""
        return {"learning_rate": 0.5, "momentum": 0.5, **self.inner}

    def expected(self) -> list[tuple]:
        """What the oracle says: a line of `trace_line` for each step."""
        inner = self.inner_options()
        optimizer = SGD(inner.pop("learning_rate"), inner.pop("momentum"))
        accumulated = inner.pop("gradient_accumulation_steps", 1)
        optimizer = Accumulating(Clipping(optimizer, **inner), accumulated)
        training = ScaledTraining(LossScaleOracle(**self.options()), optimizer, WEIGHTS)
        lines = []
        for step in range(len(self.steps)):
            scale = training.loss_scale.scale
            training.step(
                [g * scale for g in self.gradients(step)],
                bool(np.isfinite(self.loss(step))),
            )
            lines.append(
                trace_line(
                    training.loss_scale.state, optimizer.iterations, training.weights
                )
            )
        return lines


def trace_line(state: Any, iterations: Any, weights: Any) -> tuple:
    """What is compared after a step, to the bit: scale, counters, iterations, weights.

    Args:
        state: the scale and its counters, as `optimizer._loss_scaling.variables`.
        iterations: `optimizer.iterations`.
        weights: the variables, or their values.
    """
    scale, *counters = (np.asarray(s) for s in state)
    return (
        float(scale),
        *(int(c) for c in counters),
        int(np.asarray(iterations)),
        *(np.asarray(w, "float32").tolist() for w in weights),
    )


SEQUENCES = {
    "all finite: the scale grows": StepSequence("........"),
    "inf": StepSequence("..i....i"),
    "nan": StepSequence("..n....n"),
    "inf on the first replica": StepSequence("..i....i", bad_replica=0),
    "nan on the first replica": StepSequence("..n....n", bad_replica=0),
    "inf at the first step": StepSequence("i......"),
    "nothing but inf, down to the floor": StepSequence(
        "iiiiii..", scaling={"initial_scale": 8.0}
    ),
    "up to the ceiling": StepSequence("......i..", scaling={"max_scale": 2048.0}),
    "a floor below one": StepSequence(
        "iii.i.", scaling={"initial_scale": 0.5, "min_scale": 0.125}
    ),
    "broken: the scale stays": StepSequence(".bb..b..b"),
    "broken on the first replica": StepSequence(".bb..b..b", bad_replica=0),
    "hysteresis": StepSequence(".i.ii.iii.", scaling={"hysteresis": 2}),
    "a static scale": StepSequence("..i.n.b.", scaling={"dynamic": False}),
    "other factors": StepSequence(
        "...i...ii.", scaling={"growth_factor": 4.0, "backoff_factor": 0.125}
    ),
    "sparse": StepSequence("..i.n.b..", sparse=True),
    "accumulated": StepSequence(
        "..i....n.b...", inner={"gradient_accumulation_steps": 4}
    ),
    "accumulated, sparse": StepSequence(
        "..i....n.b...", inner={"gradient_accumulation_steps": 4}, sparse=True
    ),
    "clipped by value": StepSequence("..i.n.b..", inner={"clipvalue": 0.5}),
}
