"""The `keras-mp` command.

A module of its own beside the package: `import keras_mp` imports Keras, and Keras
reads `KERAS_BACKEND` once, when it is imported. What has to happen before that has
to be written where Keras is not needed: here, only the standard library is imported.
"""

import argparse
import builtins
import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

BACKENDS = ("jax", "tensorflow", "torch")
POLICIES = ("auto", "mixed_float16", "mixed_bfloat16", "float32")

# --------------------------------------------------------------------------------
# keras-mp run


class PolicyOnKerasImport:
    """Sets the policy at the moment a script has imported Keras.

    A script may choose its backend in its first lines and import Keras after that, so
    Keras cannot be imported for it ahead of time. This finder stands in front of
    Python's own ones, waits for `keras`, has it loaded as ever, and then imports
    `keras_mp` and sets the policy, before the script's next line. With that done, it
    takes itself away.

    A script that imports `keras_mp` itself gets there the other way round: Keras is
    complete while `keras_mp` is still half-way. So each of the two is waited for:

        keras is complete     -> import keras_mp (nothing happens if that is under way)
        keras_mp is complete  -> set the policy, stop waiting

    A failed import changes nothing: the script may catch it and try another backend.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.done = False

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
        """Is called when the module of this name has been imported completely."""
        if name == "keras":
            importlib.import_module("keras_mp")
        elif not self.done:
            importlib.import_module("keras_mp.loss_scaling.summary").start()
            importlib.import_module("keras_mp").set_global_policy(self.policy)
            self.done = True
            sys.meta_path.remove(self)


class _LoaderThatReports:
    """A module's own loader, with word to the finder once the module is complete."""

    def __init__(self, loader: Any, finder: PolicyOnKerasImport) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: types.ModuleType) -> None:
        # From here on the module has its own loader, as if nobody had been here.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.loaded(module.__name__)


def run(policy: str, script: str, args: Sequence[str]) -> None:
    """Runs a Keras script under a policy, as `python SCRIPT ARGS` would without it.

    The exit status, and an exception, go on to the caller; the exception's traceback
    has been printed then.
    """
    # Python names the file so, in tracebacks and in __file__: absolute, not tidied up.
    path = os.path.join(os.getcwd(), script)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        fail(f"cannot read the script {script!r}: {error.strerror}")

    hook = PolicyOnKerasImport(policy)
    sys.meta_path.insert(0, hook)
    sys.argv = [script, *args]
    if not sys.flags.safe_path:  # under `python -P` no folder was put there
        sys.path[0] = os.path.dirname(os.path.realpath(path))

    # A module of its own, and it stays: pickle and multiprocessing look things up in
    # sys.modules["__main__"], at exit too.
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    sys.modules["__main__"] = module
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _remove_our_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        # It goes on to the interpreter, which knows the right exit status (an
        # interrupted process ends by its signal) and would print it once more.
        sys.excepthook = lambda *_: None
        raise
    finally:
        for line in _report(hook):
            print(f"keras-mp: {line}", file=sys.stderr)


def _report(hook: PolicyOnKerasImport) -> Iterator[str]:
    """What there is to say when the script has ended, line by line."""
    if not hook.done:
        yield "the script never imported keras, so no policy was set"
        return
    # Whatever state the script has left things in, its own exit status comes first.
    try:
        lines = importlib.import_module("keras_mp.loss_scaling.summary").lines()
    except Exception as error:
        lines = [f"no summary of the optimizers: {type(error).__name__}: {error}"]
    yield from lines or ["the script compiled no model with an optimizer"]


def _remove_our_frames(error: BaseException) -> None:
    """Makes the traceback what it is without us, in the exceptions behind it too.

    Python hides the frames of its import machinery, but not where a frame of ours
    stands between them. So ours go, and the import machinery's right beside them.
    """
    ours = _remove_our_frames.__code__.co_filename

    def is_internal(trace: types.TracebackType) -> bool:
        file = trace.tb_frame.f_code.co_filename
        return file == ours or file.startswith("<frozen importlib")

    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        pending += [current.__cause__, current.__context__]

        kept: list[types.TracebackType] = []
        for internal, group in itertools.groupby(_traces(current), is_internal):
            traces = list(group)
            files = {trace.tb_frame.f_code.co_filename for trace in traces}
            if not (internal and ours in files):
                kept += traces
        for trace, following in itertools.zip_longest(kept, kept[1:]):
            trace.tb_next = following
        current.__traceback__ = kept[0] if kept else None


def _traces(error: BaseException) -> list[types.TracebackType]:
    """The frames of an exception's traceback, outermost first."""
    traces = []
    trace = error.__traceback__
    while trace is not None:
        traces.append(trace)
        trace = trace.tb_next
    return traces


# --------------------------------------------------------------------------------
# keras-mp demo


def demo(backend: str | None, epochs: int, out: str) -> None:
    """Runs the demo on the backend asked for, or on the one that fits best."""
    os.environ["KERAS_BACKEND"] = choose_backend(backend)
    importlib.import_module("keras_mp.cli.demo").demo(epochs=epochs, out=out)


def choose_backend(asked: str | None, preferred: str | None = None) -> str:
    """The backend asked for, by argument or KERAS_BACKEND, or one that is installed.

    Where nobody asked, that is the preferred one if it is installed, else the one in
    Keras' own configuration file, else the first of jax, tensorflow and torch that is.
    """
    asked = asked or os.environ.get("KERAS_BACKEND")
    if asked:
        if asked not in BACKENDS:
            fail(
                f"the backend must be one of {', '.join(BACKENDS)}. "
                f"Received: KERAS_BACKEND={asked}"
            )
        if not is_installed(asked):
            fail(f"{asked} is not installed: pip install 'keras_mp[{asked}]'")
        return asked

    for backend in (preferred, configured_backend(), *BACKENDS):
        if backend in BACKENDS and is_installed(backend):
            return backend
    fail(
        f"none of {', '.join(BACKENDS)} is installed, and Keras needs one of them: "
        f"pip install 'keras_mp[{BACKENDS[0]}]'"
    )


def configured_backend() -> str | None:
    """The backend in Keras' configuration file, read without importing Keras."""
    folder = os.path.expanduser(os.environ.get("KERAS_HOME", "~/.keras"))
    # Keras, too, goes on without a file that is missing or damaged.
    with contextlib.suppress(OSError, ValueError):
        with open(os.path.join(folder, "keras.json"), encoding="utf-8") as file:
            config = json.load(file)
        if isinstance(config, dict):
            backend = config.get("backend")
            return backend if isinstance(backend, str) else None
    return None


def is_installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


# --------------------------------------------------------------------------------
# keras-mp inspect


def inspect(path: str, backend: str | None) -> None:
    """Prints what the layers of a model in a file compute in."""
    if not os.path.isfile(path):
        fail(f"cannot read the model {path!r}: there is no such file")
    os.environ["KERAS_BACKEND"] = choose_backend(backend)
    keras_mp = importlib.import_module("keras_mp")
    load_model = importlib.import_module("keras").models.load_model
    try:
        model = load_model(path)
    except Exception as with_optimizer:
        # A loss or an optimizer of the user's own is no reason to show nothing.
        try:
            model = load_model(path, compile=False)
        except Exception:
            fail(f"cannot open the model {path!r}: {_one_line(with_optimizer)}")
        print(
            f"keras-mp: opened without what it was compiled with: "
            f"{_one_line(with_optimizer)}",
            file=sys.stderr,
        )
    print(keras_mp.inspect(model))


def _one_line(error: Exception) -> str:
    """What an exception says, without the configurations that Keras quotes."""
    told = str(error).split("Exception encountered: ")[-1]
    told = told.split("Full object config: ")[0].strip().split("\n\n")[0]
    return " ".join(told.split()) or type(error).__name__


# --------------------------------------------------------------------------------
# keras-mp replay


def replay(folder: str, backend: str | None, script: str | None) -> None:
    """Prints what a saved step does here, on the backend asked for or on its own."""
    os.environ["KERAS_BACKEND"] = choose_backend(backend, _backend_of(folder))
    module = importlib.import_module("keras_mp.diagnostics.breakpoint.replay")
    error = importlib.import_module("keras_mp.errors").BreakpointError
    try:
        names = module.names_in(script) if script else {}
        print(module.replay(folder, build=names.get("build"), custom_objects=names))
    except error as refused:
        fail(_one_line(refused))


def _backend_of(folder: str) -> str | None:
    """The backend that a breakpoint was saved on; None if that cannot be read."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        with open(os.path.join(folder, "breakpoint.json"), encoding="utf-8") as file:
            return json.load(file).get("backend")
    return None


# --------------------------------------------------------------------------------
# keras-mp doctor


def doctor(backend: str | None) -> None:
    """Prints what is here, what is fast here, and what "auto" picks."""
    os.environ["KERAS_BACKEND"] = choose_backend(backend)
    print(importlib.import_module("keras_mp.diagnostics.doctor").examine())


# --------------------------------------------------------------------------------
# keras-mp compare


def compare(script: str, backend: str | None, out: str | None, **options: Any) -> None:
    """Trains what a script defines under several policies, and prints what differs.

    The script is imported as a module, before Keras is: it may choose the backend in
    its first lines, as it may without us, but not another one than `backend`.
    """
    os.environ["KERAS_BACKEND"] = choose_backend(backend)
    module = _imported(script)
    keras_mp = importlib.import_module("keras_mp")
    chosen = importlib.import_module("keras").backend.backend()
    if backend not in (None, chosen):
        fail(f"the script {script!r} chooses {chosen} itself, and not {backend}")
    for name, rule in (
        ("build", "returns a compiled model"),
        ("data", "returns what to train with and what to validate with"),
    ):
        if not callable(getattr(module, name, None)):
            fail(f"the script {script!r} must define {name}(), which {rule}")
    data = module.data()
    if not isinstance(data, tuple) or len(data) != 2:
        fail(f"data() must return (train, validation). Received: {type(data).__name__}")
    try:
        comparison = keras_mp.compare(module.build, *data, **options)
    except (TypeError, ValueError) as error:
        # One of ours says all; one of the script's, or of Keras', needs its traceback.
        name = _traces(error)[-1].tb_frame.f_globals["__name__"]
        if not name.startswith("keras_mp.diagnostics"):
            raise
        fail(_one_line(error))
    print(comparison)
    if out is not None:
        comparison.to_html(out)


def _imported(script: str) -> types.ModuleType:
    """The script as a module, which finds those beside it; without its main part."""
    path = os.path.join(os.getcwd(), script)
    name = os.path.splitext(os.path.basename(path))[0].replace(".", "_")
    if not os.path.isfile(path):
        fail(f"cannot read the script {script!r}: there is no such file")
    sys.argv = [script]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    # Where pickle looks for what it defines.
    sys.modules[name] = module
    loader.exec_module(module)
    return module


# --------------------------------------------------------------------------------
# keras-mp bench


def bench(suite: str, **options: Any) -> None:
    """Measures a suite, each case in a process of its own with its own backend."""
    backends = options["backends"]
    # Nothing is computed in this process.
    os.environ["KERAS_BACKEND"] = choose_backend(backends[0] if backends else None)
    command = importlib.import_module("benchmarks.command")
    try:
        print(command.bench(suite, **options))
    except ValueError as error:
        # One of ours says all; another needs its traceback.
        name = _traces(error)[-1].tb_frame.f_globals["__name__"]
        if not name.startswith("benchmarks"):
            raise
        fail(_one_line(error))


# --------------------------------------------------------------------------------
# the command line


def fail(message: str) -> NoReturn:
    """Ends with one line on stderr and the exit status of a wrong command line."""
    print(f"keras-mp: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1. Received: {text}"
        )
    return number


def _file_to_write(text: str) -> str:
    # Better now than after two minutes of training.
    folder = os.path.dirname(text) or "."
    if not text or os.path.isdir(text) or not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that exists. Received: {text}"
        )
    return text


def _version() -> str:
    try:
        return importlib.metadata.version("keras_mp")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _add_backend(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--backend",
        choices=BACKENDS,
        # no default to show: it depends on what is installed
        default=argparse.SUPPRESS,
        help="the Keras backend (default: KERAS_BACKEND, else the one in keras.json, "
        "else the first that is installed)",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-mp",
        description="Mixed precision for Keras 3.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"keras-mp {_version()}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )

    command = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="train a small network under three policies and compare them",
        description="Trains a small convolutional network on scikit-learn's "
        "handwritten digits under float32, mixed_float16 and mixed_bfloat16, prints "
        "a table and draws the loss and the loss scale over time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_backend(command)
    command.add_argument(
        "--epochs",
        type=_at_least_one,
        default=12,
        metavar="N",
        help="epochs under each policy",
    )
    command.add_argument(
        "--out",
        type=_file_to_write,
        default="keras_mp_demo.png",
        metavar="PATH",
        help="where to write the picture",
    )

    command = commands.add_parser(
        "compare",
        allow_abbrev=False,
        help="train what a script defines under several policies, and compare",
        description="Imports a script that defines build(), which returns a compiled "
        "model, and data(), which returns (train, validation), trains under each "
        "policy from the same weights with the same batches, and prints what differs: "
        "metrics, time, memory, skipped steps.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_backend(command)
    command.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default="float32,mixed_float16,mixed_bfloat16",
        metavar="A,B,...",
        help="the policies; the others are compared with the first",
    )
    for name, default, told in (
        ("--seeds", 3, "trainings under each policy"),
        ("--epochs", 1, "epochs of each training"),
        ("--batch-size", 32, "the size of batches of arrays"),
    ):
        command.add_argument(
            name, type=_at_least_one, default=default, metavar="N", help=told
        )
    command.add_argument(
        "--out",
        type=_file_to_write,
        # No default to show.
        default=argparse.SUPPRESS,
        metavar="PATH",
        help="where to write it as HTML, with a picture",
    )
    command.add_argument("script", metavar="SCRIPT", help="a Python file")

    command = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="say what hardware is here, what is fast on it, which policy suits it",
        description="Prints the backend, its devices and the driver, times matrix "
        "products in float32, float16 and bfloat16 for a second, and says which "
        "policy `auto` picks, why, and what is missing.",
    )
    _add_backend(command)

    command = commands.add_parser(
        "bench",
        allow_abbrev=False,
        help="measure what loss scaling costs, what a policy gains, whether it learns",
        description="Suites: cost, a step with loss scaling over the same step "
        "without, for keras_mp and others; seams, what keras_mp costs elsewhere; "
        "train, speed and memory of whole training steps under each policy; quality, "
        "what trainings to the end come to. Prints tables; writes JSON, and a picture.",
    )
    command.add_argument(
        "--suite",
        choices=("cost", "seams", "train", "quality"),
        default="cost",
        help="what to measure (default: cost)",
    )
    for name, told in (
        ("--case", "cases of the suite (default: all but those that take long)"),
        ("--backend", "Keras backends (default: those installed; quality: the first)"),
        ("--peer", "whom cost measures (default: all)"),
    ):
        command.add_argument(
            name, type=lambda text: text.split(","), metavar="A,B,...", help=told
        )
    command.add_argument(
        "--seconds",
        type=_at_least_one,
        metavar="N",
        help="how long to time: a case, or train as a whole",
    )
    command.add_argument(
        "--resume",
        action="store_true",
        help="leave out what the file holds already, as after a run that was cut off",
    )
    command.add_argument(
        "--out",
        type=_file_to_write,
        metavar="PATH",
        help="the JSON file, renewed where it is there (default: keras_mp_SUITE.json)",
    )

    command = commands.add_parser(
        "inspect",
        allow_abbrev=False,
        help="print what the layers of a saved model compute in, and why",
        description="Opens a saved Keras model and prints, for every layer, what it "
        "computes in and returns, what decided that, and how large it is, with what "
        "to look at. The model is not run.",
    )
    _add_backend(command)
    command.add_argument("model", metavar="MODEL", help="a .keras or .h5 file")

    command = commands.add_parser(
        "replay",
        allow_abbrev=False,
        help="take a step again that overflowed and was saved by OverflowBreakpoint",
        description="Opens what the callback OverflowBreakpoint has saved, takes the "
        "step again, at the loss scale at which it overflowed, and prints whether it "
        "overflows here too, and what keras_mp.diagnose says of it. Unless a backend "
        "is asked for, on the one where it was saved.",
    )
    _add_backend(command)
    command.add_argument(
        "--script",
        metavar="SCRIPT",
        help="a script that defines the model's own classes; where only its weights "
        "could be saved, also `build()`, which returns the compiled model. It is not "
        "run as __main__",
    )
    command.add_argument("folder", metavar="FOLDER", help="the callback's folder")

    command = commands.add_parser(
        "run",
        allow_abbrev=False,
        help="run an unmodified Keras training script under a policy",
        description="Runs a Keras training script as `python SCRIPT ARGS` would, with "
        "the global policy set as soon as the script has imported Keras. A policy that "
        "the script sets itself wins. At the end, one line per optimizer on stderr: "
        "loss scale, steps, skipped steps.",
    )
    command.add_argument(
        "--policy",
        choices=POLICIES,
        default="auto",
        help="the policy; auto is what suits the hardware (default: auto)",
    )
    command.add_argument("script", metavar="SCRIPT", help="the training script")
    command.add_argument(
        "args",
        metavar="ARGS",
        nargs=argparse.REMAINDER,
        help="the script's own arguments: everything after SCRIPT",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of `keras-mp` and of `python -m keras_mp_cli`."""
    options = _parser().parse_args(argv)
    if options.command == "run":
        run(options.policy, options.script, options.args)
    elif options.command == "inspect":
        inspect(options.model, getattr(options, "backend", None))
    elif options.command == "replay":
        replay(options.folder, getattr(options, "backend", None), options.script)
    elif options.command == "compare":
        compare(
            options.script,
            getattr(options, "backend", None),
            getattr(options, "out", None),
            policies=options.policies,
            seeds=options.seeds,
            epochs=options.epochs,
            batch_size=options.batch_size,
        )
    elif options.command == "bench":
        bench(
            options.suite,
            cases=options.case,
            backends=options.backend,
            peers=options.peer,
            seconds=options.seconds,
            out=options.out,
            resume=options.resume,
        )
    elif options.command == "doctor":
        doctor(getattr(options, "backend", None))
    else:
        demo(getattr(options, "backend", None), options.epochs, options.out)


if __name__ == "__main__":
    main()
