"""How long JAX takes to trace and to compile a step with loss scaling."""

import gc
import random
import time
from typing import Any

from benchmarks.cost.cases import case_named
from benchmarks.cost.peers import steps_on
from benchmarks.pairs import quartiles

# How many rounds, and peer -> suffix of its name in the results. Keras' own wrapper
# takes too long with a thousand variables.
_BOTH = {"keras_mp": "", "keras": ", Keras' own wrapper"}
ROUNDS = {
    "compile-10": (15, _BOTH),
    "compile-100": (31, _BOTH),
    "compile-1000": (5, {"keras_mp": ""}),
}


def compilations(case: str, smallest: bool) -> dict[str, Any]:
    """The ratios over the step without loss scaling: name -> quartiles.

    Args:
        case: a key of ROUNDS.
        smallest: whether to take the smallest sizes, once.
    """
    rounds, suffixes = ROUNDS[case]
    problem = case_named(case.replace("compile", "no-jit")).problem
    steps = steps_on("jax")
    makers = {name: steps.scaled[name] for name in suffixes}
    makers[""] = steps.unscaled["keras"]
    ratios: dict[str, list[float]] = {}
    order = random.Random(0)
    # The first round is small and not counted: it covers what Python does only once.
    for small in (True, *[smallest] * (1 if smallest else rounds)):
        times = {
            name: _stages(makers[name](problem(small), True))
            for name in order.sample(list(makers), len(makers))
        }
        for name, suffix in suffixes.items():
            for stage in ("trace", "compile"):
                ratio = times[name][stage] / times[""][stage]
                ratios.setdefault(stage + suffix, []).append(ratio)
    return {name: quartiles(found[1:])._asdict() for name, found in ratios.items()}


def _stages(step: Any) -> dict[str, float]:
    """The seconds of each stage for a step that JAX has not seen before.

    "compile" is lowering and compiling. Processor time: other processes do not count.
    """
    import jax

    arguments = step.arguments()
    jax.clear_caches()
    gc.collect()
    gc.disable()  # It might run in one of the steps and not in the other.
    try:
        start = time.process_time()
        traced = step.step.trace(*arguments)
        middle = time.process_time()
        traced.lower().compile()
        return {"trace": middle - start, "compile": time.process_time() - middle}
    finally:
        gc.enable()
