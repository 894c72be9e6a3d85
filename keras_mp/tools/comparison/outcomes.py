"""The results of trainings that differ in policy and seed, in numbers."""

import dataclasses
import math
import statistics
from collections import Counter
from typing import Any

from keras_mp.tools.comparison import judgement
from keras_mp.tools.comparison.judgement import Difference, Ratio
from keras_mp.tools.comparison.training import Training


@dataclasses.dataclass(frozen=True, repr=False)
class Outcomes:
    """Trainings under several policies with several seeds.

    Attributes:
        backend: the backend that they ran on.
        policies: their labels; the others are compared with the first.
        seeds: of the trainings.
        epochs: of each training.
        trainings: ordered by seed, and then by policy.
        notes: sentences on what else there is to know, or to look at.
    """

    backend: str
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    epochs: int
    trainings: tuple[Training, ...]
    notes: tuple[str, ...] = ()

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that `evaluate` returned as numbers."""
        return list(dict.fromkeys(name for t in self.trainings for name in t.metrics))

    def of(self, policy: str) -> list[Training]:
        """The trainings under a policy, one for each seed."""
        return [t for t in self.trainings if t.policy == policy]

    def values(self, policy: str, metric: str) -> list[float]:
        """A final metric with each seed; nan where the training has diverged."""
        return [
            math.nan if t.diverged else t.metrics.get(metric, math.nan)
            for t in self.of(policy)
        ]

    def difference(self, policy: str, metric: str) -> Difference:
        """A final metric, compared with that under the first policy."""
        base = self.values(self.policies[0], metric)
        return judgement.difference(base, self.values(policy, metric))

    def speed(self, policy: str) -> Ratio | None:
        """How many times as fast a step is as under the first; None if not measured."""
        base, own = self._both(policy, "seconds_per_step")
        return judgement.ratio(own, base)

    def memory(self, policy: str) -> Ratio | None:
        """The peak memory relative to the first policy's; None if not measured."""
        return judgement.ratio(*self._both(policy, "peak_memory"))

    def _both(self, policy: str, what: str) -> tuple[list[Any], list[Any]]:
        base = [getattr(t, what) for t in self.of(self.policies[0])]
        return base, [getattr(t, what) for t in self.of(policy)]

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, for JSON.

        nan and infinity, which JSON lacks, are None.
        """
        return {
            "backend": self.backend,
            "policies": list(self.policies),
            "seeds": list(self.seeds),
            "epochs": self.epochs,
            "notes": list(self.notes),
            "metrics": {
                metric: {p: self._compared(p, metric) for p in self.policies}
                for metric in self.metrics
            },
            "speed": {p: _as_dict(self.speed(p)) for p in self.policies},
            "peak_memory": {p: _as_dict(self.memory(p)) for p in self.policies},
            "trainings": [
                {
                    **dataclasses.asdict(t),
                    "metrics": {name: _finite(x) for name, x in t.metrics.items()},
                    "losses": [_finite(x) for x in t.losses],
                    "compute_dtypes": dict(Counter(t.compute_dtypes)),
                }
                for t in self.trainings
            ],
        }

    def _compared(self, policy: str, metric: str) -> dict[str, Any]:
        values = [x for x in self.values(policy, metric) if math.isfinite(x)]
        found = self.difference(policy, metric)
        return {
            "mean": statistics.fmean(values) if values else None,
            "spread": judgement.spread_of(values),
            "difference": _finite(found.mean),
            "half_width": found.half_width,
            "verdict": found.verdict,
        }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _as_dict(ratio: Ratio | None) -> dict[str, float] | None:
    return ratio and ratio._asdict()
