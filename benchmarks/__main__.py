"""`python -m benchmarks`: measures a suite and prints its tables."""

import argparse
import importlib
import importlib.util
import os

from benchmarks import BACKENDS, SUITES


def main() -> None:
    """Reads the command line, measures, prints."""
    parser = _parser()
    options = parser.parse_args()
    _set_backend(options.backend)
    # Here, not above: it imports Keras, which reads KERAS_BACKEND once.
    run = importlib.import_module("benchmarks.run")
    try:
        plan = run.plan(
            options.suite,
            cases=options.case,
            backends=options.backend,
            peers=options.peer,
            seconds=options.seconds,
            out=options.out,
            resume=options.resume,
        )
    except ValueError as error:
        parser.error(str(error))
    print(run.measure(plan))


def _set_backend(asked: list[str] | None) -> None:
    """Chooses a backend that is installed; this process computes nothing with it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    known = [b for b in (*(asked or ()), *BACKENDS) if b in BACKENDS]
    installed = [b for b in known if importlib.util.find_spec(b)]
    if installed:
        os.environ.setdefault("KERAS_BACKEND", installed[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        allow_abbrev=False,
        description="Suites: cost, a step with loss scaling over the same step "
        "without, for keras_mp and others; seams, what keras_mp costs elsewhere; "
        "kernels, what torch runs in a step, counted; "
        "train, speed and memory of whole training steps under each policy; quality, "
        "the results of trainings to the end. Prints tables; writes JSON.",
    )
    parser.add_argument(
        "--suite",
        choices=SUITES,
        default="cost",
        help="what to measure (default: cost)",
    )
    for name, text in (
        ("--case", "cases of the suite (default: all but those that take long)"),
        ("--backend", "Keras backends (default: those installed; quality: the first)"),
        ("--peer", "the packages that cost measures (default: all)"),
    ):
        parser.add_argument(
            name, type=lambda names: names.split(","), metavar="A,B,...", help=text
        )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="how long to time: each case, or all of train",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with a run that was cut off: leave out what the file has already",
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="the JSON file; records that are not measured now stay in it "
        "(default: keras_mp_SUITE.json)",
    )
    return parser


if __name__ == "__main__":
    main()
