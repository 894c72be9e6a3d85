"""The rule of dynamic loss scaling: (state, were the gradients finite?) -> state.

Nothing here knows of optimizers, models or devices. The rule, as pseudocode:

    if finite:  consecutive_skips = 0; finite_steps += 1
                if finite_steps >= dynamic_growth_steps:
                    scale = min(scale * growth_factor, max_scale); finite_steps = 0
    else:       skipped_steps += 1; consecutive_skips += 1
                if the loss itself was finite, scale > min_scale, and dynamic:
                    finite_steps = 0
                    if consecutive_skips >= hysteresis:
                        scale = max(scale * backoff_factor, min_scale)
                else: broken_steps += 1

If the loss is not finite, or the gradients are not finite at the lowest scale, then the
scale is not to blame: it stays, however often that happens.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2 and its
appendix on dynamic scaling; hysteresis as in NVIDIA Apex: the first skips in a row are
forgiven, every further one in that row backs off.
"""

import dataclasses
import math
import numbers
from typing import Any, NamedTuple

from keras import ops

# Between these a scale and its reciprocal are both normal float32 numbers: beyond
# them a division by the scale would be flushed to zero or overflow.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
# Counters are int32: more steps than this in a row are never counted.
LARGEST_STEP_COUNT = 2**31 - 1


class LossScaleState(NamedTuple):
    """What dynamic loss scaling remembers from one step to the next.

    Attributes:
        scale: float32 scalar, what the loss is multiplied by.
        finite_steps: integer scalar, finite steps since the scale last moved or a
            step was skipped.
        skipped_steps: integer scalar, steps skipped so far.
        consecutive_skips: integer scalar, steps skipped since the last finite one.
        broken_steps: integer scalar, skipped steps that no scale could have saved.
    """

    scale: Any
    finite_steps: Any
    skipped_steps: Any
    consecutive_skips: Any
    broken_steps: Any


@dataclasses.dataclass(frozen=True)
class LossScaleRule:
    """How the loss scale moves; see the module's pseudocode.

    Args:
        initial_scale: the scale of the first step, within the bounds.
        dynamic_growth_steps: finite steps in a row before the scale grows.
        dynamic: whether the scale moves at all. Skips are counted either way.
        growth_factor: what the scale is multiplied by when it grows, above 1.
        backoff_factor: what it is multiplied by when it backs off, within (0, 1).
        min_scale: the scale never falls below this.
        max_scale: the scale never rises above this.
        hysteresis: non-finite steps in a row before the scale backs off.

    Raises:
        ValueError: for an argument outside its range.
    """

    initial_scale: float = 2.0**15
    dynamic_growth_steps: int = 2000
    dynamic: bool = True
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

        def check(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise _refusal(name, rule, given[name])

        for name in ("dynamic_growth_steps", "hysteresis"):
            check_whole_number(name, given[name])
            # No NumPy numbers: configs are written as JSON.
            object.__setattr__(self, name, int(given[name]))
        check("dynamic", isinstance(self.dynamic, bool), "be True or False")
        for name in _REALS:
            # A float16 would be compared with the bounds in float16.
            object.__setattr__(self, name, _as_float(given[name]))
        grows = 1 < self.growth_factor < math.inf
        check("growth_factor", grows, "be greater than 1 and finite")
        backs_off = 0 < self.backoff_factor < 1
        check("backoff_factor", backs_off, "lie between 0 and 1, both excluded")
        for name in ("min_scale", "max_scale"):
            normal = SMALLEST_SCALE <= getattr(self, name) <= LARGEST_SCALE
            check(name, normal, "lie between 2**-126 and 2**126")
        if self.min_scale > self.max_scale:
            raise ValueError(
                "`min_scale` must not be greater than `max_scale`. Received: "
                f"min_scale={self.min_scale}, max_scale={self.max_scale}."
            )
        check(
            "initial_scale",
            self.min_scale <= self.initial_scale <= self.max_scale,
            f"lie between min_scale={self.min_scale} and max_scale={self.max_scale}",
        )

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step, as Python numbers."""
        return LossScaleState(self.initial_scale, 0, 0, 0, 0)

    def next(
        self, state: LossScaleState, finite: Any, loss_finite: Any = True
    ) -> LossScaleState:
        """Returns the state after a step.

        Args:
            state: the `LossScaleState` before the step.
            finite: bool scalar, whether all gradients of the step were finite.
            loss_finite: bool scalar, whether its loss was, before it was scaled.

        Returns:
            A `LossScaleState` of backend scalars, dtypes as in `state`; Python
            numbers become float32 and int32. Works eagerly and inside compiled
            functions.
        """
        state = LossScaleState(
            ops.convert_to_tensor(state.scale, "float32"),
            *(
                ops.convert_to_tensor(n, "int32") if isinstance(n, int) else n
                for n in state[1:]
            ),
        )
        applied = self._after_finite(state)
        if finite is True:  # Python knows it: the other half is not computed.
            return applied
        finite = ops.convert_to_tensor(finite, "bool")
        skipped = self._after_nonfinite(state, loss_finite)
        return LossScaleState(
            *(
                yes if yes is no else ops.where(finite, yes, no)
                for yes, no in zip(applied, skipped, strict=True)
            )
        )

    def _after_finite(self, state: LossScaleState) -> LossScaleState:
        longer = state.finite_steps + 1
        grows = longer >= min(self.dynamic_growth_steps, LARGEST_STEP_COUNT)
        scale = state.scale
        if self.dynamic:
            grown = ops.minimum(scale * self.growth_factor, self.max_scale)
            scale = ops.where(grows, grown, scale)
        return state._replace(
            scale=scale,
            finite_steps=ops.where(grows, ops.zeros_like(longer), longer),
            consecutive_skips=ops.zeros_like(state.consecutive_skips),
        )

    def _after_nonfinite(
        self, state: LossScaleState, loss_finite: Any
    ) -> LossScaleState:
        state = state._replace(
            skipped_steps=state.skipped_steps + 1,
            consecutive_skips=state.consecutive_skips + 1,
        )
        if not self.dynamic:  # A scale that does not move is never lowered.
            return state._replace(broken_steps=state.broken_steps + 1)
        scale, longest = state.scale, min(self.hysteresis, LARGEST_STEP_COUNT)
        loss_finite = ops.convert_to_tensor(loss_finite, "bool")
        too_high = ops.logical_and(loss_finite, scale > self.min_scale)
        backs_off = ops.logical_and(too_high, state.consecutive_skips >= longest)
        backed_off = ops.maximum(scale * self.backoff_factor, self.min_scale)
        broken = ops.cast(ops.logical_not(too_high), state.broken_steps.dtype)
        finite_steps = state.finite_steps
        return state._replace(
            scale=ops.where(backs_off, backed_off, scale),
            finite_steps=ops.where(
                too_high, ops.zeros_like(finite_steps), finite_steps
            ),
            broken_steps=state.broken_steps + broken,
        )


def check_whole_number(name: str, value: Any, least: int = 1) -> None:
    """Raises a ValueError unless `value` is a whole number of at least `least`."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (whole and value >= least):
        raise _refusal(name, f"be a whole number of at least {least}", value)


_REALS = ("initial_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")


def _as_float(value: Any) -> float:
    """The value as a float; if it is no number, nan, which every rule refuses."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # A whole number past the largest float.
        return math.inf


def _refusal(name: str, rule: str, value: Any) -> ValueError:
    return ValueError(f"`{name}` must {rule}. Received: {name}={value!r}.")
