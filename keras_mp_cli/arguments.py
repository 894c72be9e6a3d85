"""The arguments of every command."""

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import distributions
from typing import Any

from keras_mp_cli.backends import BACKENDS

POLICIES = ("auto", "mixed_float16", "mixed_bfloat16", "bfloat16", "float32")
# keras_mp knows them, too, but cannot be imported before the backend is chosen.
_SHORT_NAMES = {"half": "mixed_float16", "fp16": "mixed_float16",
                "bf16": "mixed_bfloat16", "fp32": "float32"}  # fmt: skip


def parsed(argv: Sequence[str] | None) -> dict[str, Any]:
    """The `command` that the user asks for, and its arguments."""
    parser, commands = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        # argparse itself shows the usage of `keras-mp` here.
        command = commands.choices[options.command]
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    return vars(options)


def _parser() -> tuple[argparse.ArgumentParser, Any]:
    parser = argparse.ArgumentParser(
        prog="keras-mp",
        description="Mixed precision for Keras 3.",
        allow_abbrev=False,
    )
    found = (package.version for package in distributions(name="keras_mp"))
    version = f"keras-mp {next(found, '(not installed)')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for add in (_demo, _compare, _doctor, _inspect, _replay, _run):
        add(commands)
    return parser, commands


def _demo(commands: Any) -> None:
    command = _command(
        commands,
        "demo",
        "train a small network under three policies and compare them",
        "Trains a small convolutional network on scikit-learn's handwritten digits "
        "under float32, mixed_float16 and mixed_bfloat16, prints a table and draws "
        "the loss and the loss scale over time.",
    )
    _add_backend(command)
    _add_number(command, "--epochs", 12, "epochs under each policy")
    _add_file(command, "keras_mp_demo.png", "where to write the picture")


def _compare(commands: Any) -> None:
    command = _command(
        commands,
        "compare",
        "train what a script defines under several policies, and compare",
        "Imports a script that defines build(), which returns a compiled model, and "
        "data(), which returns (train, validation). Trains under each policy from the "
        "same weights with the same batches, and prints what differs: metrics, time, "
        "memory, skipped steps.",
    )
    _add_backend(command)
    command.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default="float32,mixed_float16,mixed_bfloat16",
        metavar="A,B,...",
        help="the policies; the others are compared with the first",
    )
    _add_number(command, "--seeds", 3, "trainings under each policy")
    _add_number(command, "--epochs", 1, "epochs of each training")
    _add_number(command, "--batch-size", 32, "the batch size, where data are arrays")
    text = "where to write the comparison as HTML, with a picture"
    _add_file(command, argparse.SUPPRESS, text)
    command.add_argument("script", metavar="SCRIPT", help="a Python file")


def _doctor(commands: Any) -> None:
    command = _command(
        commands,
        "doctor",
        "print what hardware is here, what is fast on it, which policy suits it",
        "Prints the backend, its devices and the driver, times matrix products in "
        "float32, float16 and bfloat16 for a second, and says which policy `auto` "
        "picks, why, and what is missing.",
    )
    _add_backend(command)


def _inspect(commands: Any) -> None:
    command = _command(
        commands,
        "inspect",
        "print what the layers of a saved model compute in, and why",
        "Opens a saved Keras model and prints what every layer computes in and "
        "returns, what decided that, how large the layer is, and warnings. The model "
        "is not run. In a large model, layers that are alike share a row.",
    )
    _add_backend(command)
    text = "give each layer of a large model a row of its own"
    command.add_argument("--all", action="store_true", help=text)
    command.add_argument("model", metavar="MODEL", help="a .keras or .h5 file")


def _replay(commands: Any) -> None:
    command = _command(
        commands,
        "replay",
        "repeat a step that overflowed and was saved by OverflowBreakpoint",
        "Opens what the callback OverflowBreakpoint saved and repeats the step at the "
        "loss scale at which it overflowed. Prints whether it overflows here too, and "
        "what keras_mp.diagnose finds. Runs on the backend on which the step was "
        "saved, unless --backend names another.",
    )
    _add_backend(command)
    command.add_argument(
        "--script",
        default=argparse.SUPPRESS,
        metavar="SCRIPT",
        help="a script that defines the model's own classes; if only the weights "
        "could be saved, also `build()`, which returns the compiled model. It is not "
        "run as __main__, and only until it begins to train or exits",
    )
    command.add_argument("folder", metavar="FOLDER", help="the callback's folder")


def _run(commands: Any) -> None:
    command = _command(
        commands,
        "run",
        "run an unmodified Keras training script under a policy",
        "Runs a Keras training script as `python SCRIPT ARGS` would, and sets the "
        "global policy as soon as the script has imported Keras. A policy that the "
        "script sets itself wins, and so does a backend that it sets in os.environ. "
        "The Python processes that it starts have the policy, too. At the end, prints "
        "one line for each optimizer on stderr, loss scale, steps and skipped steps, "
        "and one with the policy and why.",
    )
    # Where argparse writes it, ARGS are "...".
    command.usage = (
        "%(prog)s [-h] [--policy POLICY] [--backend BACKEND] SCRIPT [ARGS ...]"
    )
    command.add_argument(
        "--policy",
        type=_policy,
        default="auto",
        metavar="POLICY",
        help=f"one of {', '.join(POLICIES)}; auto picks what suits the hardware",
    )
    _add_backend(command, "KERAS_BACKEND, else what Keras takes, if it is installed, ")
    command.add_argument("script", metavar="SCRIPT", help="the training script")
    args = command.add_argument(
        "args",
        metavar="ARGS",
        nargs=argparse.REMAINDER,
        help="the script's own arguments, if it takes any: everything after SCRIPT, "
        "options too",
    )
    args.required = False  # Or argparse's error would name them as required.


def _command(
    commands: Any, name: str, summary: str, description: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        allow_abbrev=False,
        help=summary,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def _add_backend(
    command: argparse.ArgumentParser,
    default: str = "KERAS_BACKEND, else the one in keras.json, ",
) -> None:
    command.add_argument(
        "--backend",
        choices=BACKENDS,
        # No default to show: it depends on what is installed.
        default=argparse.SUPPRESS,
        help=f"the Keras backend (default: {default}else the first that is installed)",
    )


def _add_number(
    command: argparse.ArgumentParser, name: str, default: int, text: str
) -> None:
    command.add_argument(
        name, type=_at_least_one, default=default, metavar="N", help=text
    )


def _add_file(command: argparse.ArgumentParser, default: str, text: str) -> None:
    command.add_argument(
        "--out", type=_file_to_write, default=default, metavar="PATH", help=text
    )


def _policy(text: str) -> str:
    if text in POLICIES:
        return text
    spelled = text.strip().lower().replace("-", "_").replace(" ", "_")
    meant = spelled if spelled in POLICIES else _SHORT_NAMES.get(spelled)
    raise argparse.ArgumentTypeError(
        f"must be one of {', '.join(POLICIES)}. Received: {text}"
        + (f". Did you mean {meant}?" if meant else "")
    )


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1. Received: {text}"
        )
    return int(text)


def _file_to_write(text: str) -> str:
    # Checked now, not after two minutes of training.
    folder = os.path.dirname(text) or "."
    if not text or os.path.isdir(text) or not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that exists. Received: {text}"
        )
    if not os.access(text if os.path.exists(text) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"must be a file that you may write. Received: {text}"
        )
    return text
