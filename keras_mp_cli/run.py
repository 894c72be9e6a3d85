"""`keras-mp run`: a script under a policy, as `python SCRIPT ARGS` runs it."""

import atexit
import builtins
import functools
import importlib
import importlib.machinery
import io
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from keras_mp_cli.arguments import POLICIES
from keras_mp_cli.backends import BACKENDS, fall_back, set_backend
from keras_mp_cli.messages import fail, is_missing_package, missing_package_is_one_line
from keras_mp_cli.tracebacks import remove_our_frames

# Keeps the counters of every optimizer, and has a line for each at the end.
_SUMMARY = "keras_mp.loss_scaling.summary"

# The processes that a script starts inherit both, and come to `go_on`.
_POLICY = "KERAS_MP_RUN_POLICY"
_STARTED = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "started_by_scripts"
)


class PolicyOnKerasImport:
    """Sets the policy as soon as a script has imported Keras.

    A script may choose its backend in its first lines and import Keras after that, so
    Keras cannot be imported before the script runs. This finder stands in front of
    Python's own finders and waits for `keras`. When Keras is imported, it imports
    `keras_mp` and sets the policy, before the script's next line. Then it removes
    itself.

    If the script imports `keras_mp` itself, Keras is complete while `keras_mp` is still
    being imported. So the finder waits for both:

        keras is complete     -> import keras_mp (nothing happens if that is under way)
        keras_mp is complete  -> set the policy, stop waiting

    A failed import changes nothing: the script may catch it and try another backend.

    Attributes:
        done: whether the policy is set.
        outcome: why not, as a line for the user.
        lacks_a_package: whether Keras could not be imported without some package.
    """

    def __init__(self, policy: str, then: Callable[[], object]) -> None:
        self.policy, self._then = policy, then
        self.done = False
        self.outcome = "the script itself never imported keras, so no policy was set"
        self.lacks_a_package = False

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds `keras` and `keras_mp` where the other finders do, and nothing else."""
        if name not in ("keras", "keras_mp"):
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec: Any = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:  # a folder without __init__.py has none
                    spec.loader = _LoaderThatReports(spec.loader, self)
                return spec
        return None

    def loaded(self, name: str) -> None:
        """Is called when the module of this name is imported completely."""
        if name == "keras":
            importlib.import_module("keras_mp")
        elif not self.done:
            importlib.import_module(_SUMMARY).start()
            importlib.import_module("keras_mp").set_global_policy(self.policy)
            self.done = True
            sys.meta_path.remove(self)
            self._then()

    def failed(self, name: str, error: BaseException) -> None:
        """Is called when the import of the module of this name raised an error."""
        self.outcome = f"the import of {name} failed, so no policy was set"
        self.lacks_a_package = isinstance(error, ModuleNotFoundError)


class _LoaderThatReports:
    """A module's own loader, which tells the finder when the module is imported."""

    def __init__(self, loader: Any, finder: PolicyOnKerasImport) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: types.ModuleType) -> None:
        # From here on the module has its own loader again.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if module.__name__ == "keras":
            # Not sooner: a script may `os.environ.setdefault("KERAS_BACKEND", ...)`.
            fall_back()
        try:
            self._loader.exec_module(module)
        except BaseException as error:
            self._finder.failed(module.__name__, error)
            raise
        self._finder.loaded(module.__name__)


def run(
    policy: str, script: str, args: Sequence[str], backend: str | None = None
) -> None:
    """Runs a Keras script under a policy, as `python SCRIPT ARGS` would without it.

    A backend that the script sets itself in `os.environ` comes before `backend`, and
    that before KERAS_BACKEND. Without any of them Keras chooses, or, if what it would
    choose is not installed, the first backend that is.

    The Python processes that the script starts have the policy, too.

    The exit status, and an exception, go on to the caller; the exception's traceback
    is printed by then.
    """
    # As Python does in tracebacks and in __file__: absolute, not normalized.
    path = os.path.join(os.getcwd(), script)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        fail(f"cannot read the script {script!r}: {error.strerror}")
    if backend is not None or not any(map(find_spec, BACKENDS)):
        with missing_package_is_one_line():
            set_backend(backend)

    _say_if_misplaced(script, args)
    hook = PolicyOnKerasImport(policy, functools.partial(_say_if_other, backend))
    sys.meta_path.insert(0, hook)
    os.environ[_POLICY] = policy
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTED, inherited]))
    sys.argv = [script, *args]
    if not sys.flags.safe_path:  # under `python -P` no folder was put there
        sys.path[0] = os.path.dirname(os.path.realpath(path))

    # A module of its own, which stays: pickle and multiprocessing look names up in
    # sys.modules["__main__"], at exit too.
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    sys.modules["__main__"] = module
    failed = False
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        failed = error.code not in (None, 0)
        raise
    except BaseException as error:
        failed = True
        remove_our_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        # It goes on to the interpreter, which knows the right exit status (an
        # interrupted process ends by its signal), but must not print it again.
        sys.excepthook = lambda *_: None
        raise
    finally:
        for line in _report(hook, failed):
            print(f"keras-mp: {line}", file=sys.stderr)


def go_on() -> None:
    """Does in a process that a script has started what `run` did for the script."""
    policy = os.environ.get(_POLICY)
    if policy:
        # Not sooner: at exit, what has registered first is called last, and the
        # backend's own clean-up removes what the summary reads.
        say = functools.partial(atexit.register, _say_what_it_trained)
        sys.meta_path.insert(0, PolicyOnKerasImport(policy, say))


def _say_what_it_trained() -> None:
    for line in importlib.import_module(_SUMMARY).lines():
        print(f"keras-mp: process {os.getpid()}: {line}", file=sys.stderr)


def _say_if_misplaced(script: str, args: Sequence[str]) -> None:
    """Names an option of `keras-mp` that stands after the script, which gets it."""
    given = [part for arg in args for part in arg.split("=", 1)]
    for option, values in {"--policy": POLICIES, "--backend": BACKENDS}.items():
        for name, value in itertools.pairwise(given):
            if name == option and value in values:
                print(
                    f"keras-mp: {option} {value} stands after {script}, which gets it. "
                    f"For keras-mp: keras-mp run {option} {value} {script}",
                    file=sys.stderr,
                )


def _say_if_other(backend: str | None) -> None:
    if backend is None:
        return
    chosen = importlib.import_module("keras").backend.backend()
    if chosen != backend:
        print(
            f"keras-mp: the script chooses {chosen} itself, and not {backend}",
            file=sys.stderr,
        )


def _report(hook: PolicyOnKerasImport, failed: bool) -> Iterator[str]:
    """The lines to print when the script has ended, or `failed`."""
    if not hook.done:
        yield _what_is_missing(hook) or hook.outcome
        return
    nothing = (
        [] if failed else ["the script itself compiled no model with an optimizer"]
    )
    # Whatever the script has done to the summary, its own exit status counts.
    try:
        summary = importlib.import_module(_SUMMARY)
        lines = [*(summary.lines() or nothing), summary.of_policy(hook.policy)]
    except Exception as error:
        lines = [f"no summary of the optimizers: {type(error).__name__}: {error}"]
    yield from lines


def _what_is_missing(hook: PolicyOnKerasImport) -> str:
    """What keras_mp says about the package that Keras did not find, if any."""
    try:
        if hook.lacks_a_package:
            sys.meta_path.remove(hook)
            importlib.import_module("keras_mp")
    except Exception as error:
        if is_missing_package(error):
            return str(error)
    return ""
