"""`keras-mp replay`."""

import contextlib
from collections.abc import Iterator
from inspect import isclass, isfunction
from typing import Any, NoReturn

import keras

import keras_mp
from keras_mp.errors import BreakpointError
from keras_mp.tools.breakpoint import replay as breakpoints
from keras_mp_cli.messages import fail, one_line
from keras_mp_cli.scripts import import_script


def replay(folder: str, script: str | None = None) -> None:
    """Prints what a saved step does here.

    Args:
        folder: what the callback OverflowBreakpoint wrote.
        script: a file that defines the model's own classes; None if there are none. It
            is run until it begins to train, or exits.
    """
    defined = {}
    if script:
        with _training_raises():
            ends = (TrainingBegins, SystemExit)
            defined = vars(import_script(script, ends=ends))
    names = {k: v for k, v in defined.items() if isfunction(v) or isclass(v)}
    build = names.get("build")
    try:
        print(breakpoints.replay(folder, build=build, custom_objects=names))
    except BreakpointError as error:
        fail(one_line(error))


class TrainingBegins(BaseException):
    """Ends a script before it trains. No Exception, which scripts may catch."""


# Every training calls one of these: a loop of the user's has `apply`.
_TRAINING = [
    (keras.Model, "fit"),
    (keras.Model, "train_on_batch"),
    (keras.optimizers.Optimizer, "apply"),
    (keras_mp.LossScaleOptimizer, "apply"),
]


@contextlib.contextmanager
def _training_raises() -> Iterator[None]:
    """Makes every training raise TrainingBegins for a while."""
    with contextlib.ExitStack() as undo:
        for owner, name in _TRAINING:
            # The class that defines it, so that calls by `super()` are caught as well.
            definer: Any = next(c for c in owner.__mro__ if name in vars(c))
            undo.callback(setattr, definer, name, vars(definer)[name])
            setattr(definer, name, _raise)
        yield


def _raise(*args: Any, **kwargs: Any) -> NoReturn:
    raise TrainingBegins("it trains")
