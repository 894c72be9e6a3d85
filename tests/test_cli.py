"""The `keras-mp` command, run as a user runs it: as a process of its own.

Most tests stand in front of a Keras of a few lines, so that they cost milliseconds and
show what the command itself does; the last ones train with the real one.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import keras
import pytest

import keras_mp

COMMAND = Path(__file__).parents[1] / "keras_mp_cli.py"
ROOT = COMMAND.parent

# What stands in for Keras says what is imported and set, in order.
FAKES = {
    "keras/__init__.py": """
        import os
        if os.environ.get("KERAS_BACKEND") == "broken":
            raise ImportError("no such backend")
        import keras.src.core
        from keras import backend, layers, models
        print("keras on", os.environ.get("KERAS_BACKEND"))
    """,
    "keras/models.py": """
        def load_model(path, compile=True):
            with open(path) as file:
                text = file.read()
            if compile or "damaged" in text:
                for line in text.splitlines():
                    raise ValueError(line + "\\nin its config\\n\\nand more")
            return "the model"
    """,
    "keras/backend.py": """
        import os
        def backend():
            return os.environ["KERAS_BACKEND"]
    """,
    "keras/layers.py": "",
    "keras/src/__init__.py": "",
    "keras/src/core.py": "",
    "keras_mp/__init__.py": """
        import keras
        from types import SimpleNamespace
        policy = "unset"
        def set_global_policy(name):
            global policy
            policy = name
            print("policy", name)
        def global_policy():
            return SimpleNamespace(name=policy)
        def inspect(model):
            return f"inspected: {model}"
        from keras_mp.diagnostics import compare
    """,
    "keras_mp/diagnostics.py": """
        from types import SimpleNamespace
        def compare(build, train, validation, **options):
            if options["policies"] == ["refused"]:
                raise ValueError("`policies` must be others.\\nReceived: these")
            print(build(), train, validation, options)
            return SimpleNamespace(to_html=lambda path: print("html to", path))
    """,
    "keras_mp/optimizer_log.py": """
        entries = None
        def start():
            global entries
            entries = ["adam: loss scale 8, 5 steps, 1 skipped"]
        def lines():
            return entries
    """,
    "keras_mp/demo.py": """
        import os
        def demo(epochs=12, out="keras_mp_demo.png"):
            print(os.environ["KERAS_BACKEND"], epochs, out)
    """,
    # like TensorFlow's, which imports Keras when its attribute is first asked for
    "tensorflow/__init__.py": """
        def __getattr__(name):
            if name != "keras":
                raise AttributeError(name)
            import keras.src.core
            return keras
    """,
}
SUMMARY = "keras-mp: adam: loss scale 8, 5 steps, 1 skipped\n"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())


class Workplace:
    """A folder with scripts, and a Python that has the fakes and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fakes = folder / "fakes"
        # The command is copied: beside the original lies the real package.
        self.command_file = folder / "bin" / COMMAND.name
        write(self.fakes, FAKES)
        write(self.folder, {f"bin/{COMMAND.name}": COMMAND.read_text()})

    def script(self, text: str, name: str = "train.py") -> str:
        write(self.folder, {name: text})
        return name

    def python(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            # -S: without what is installed, the real Keras above all
            [sys.executable, "-S", *args],
            cwd=self.folder,
            env=environment(self.folder, self.fakes, **variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def command(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.python(str(self.command_file), *args, **variables)

    def run(self, text: str, *args: str, **variables: str):
        """Runs a script under the command."""
        return self.command("run", self.script(text), *args, **variables)


def environment(home: Path, *folders: Path, **variables: str) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("KERAS_BACKEND", "KERAS_HOME") and not name.startswith("PYTHON")
    }
    path = os.pathsep.join(map(str, folders))
    return inherited | {"HOME": str(home), "PYTHONPATH": path} | variables


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


def without_our_lines(stderr: str) -> str:
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("keras-mp: "))


# --------------------------------------------------------------------------------
# run: the policy


@pytest.mark.parametrize(
    "statement",
    [
        "import keras",
        "import keras.layers",
        "import keras.src.core",
        "from keras import layers",
        "from tensorflow import keras",
        "import tensorflow as tf; tf.keras.layers",
        "import keras_mp",
        "import keras_mp, keras",
        "import keras, keras_mp",
        "from keras_mp import optimizer_log",
        "import importlib; importlib.import_module('keras')",
        "import threading as t; a = t.Thread(target=__import__, args=['keras']);"
        "a.start(); a.join()",
    ],
)
def test_policy_is_set_once_and_at_once_however_keras_is_imported(work, statement):
    result = work.run(f"{statement}\nprint('next line')")
    assert result.stdout == "keras on None\npolicy auto\nnext line\n"
    assert result.stderr == SUMMARY
    assert result.returncode == 0


def test_policy_is_the_one_that_was_asked_for(work):
    script = work.script("import keras")
    result = work.command("run", "--policy", "mixed_bfloat16", script)
    assert "policy mixed_bfloat16\n" in result.stdout


def test_policy_that_the_script_sets_itself_wins(work):
    result = work.run(
        """
        import keras, keras_mp
        keras_mp.set_global_policy("float32")
        print(keras_mp.global_policy().name)
        """
    )
    assert result.stdout.endswith("policy float32\nfloat32\n")


def test_script_may_choose_its_backend_before_it_imports_keras(work):
    result = work.run(
        """
        import os, sys
        assert not {"keras", "keras_mp", "numpy"} & set(sys.modules)
        os.environ["KERAS_BACKEND"] = "torch"
        import keras
        """
    )
    assert result.stdout == "keras on torch\npolicy auto\n"


def test_script_may_try_another_backend_when_the_first_cannot_be_imported(work):
    result = work.run(
        """
        import os
        os.environ["KERAS_BACKEND"] = "broken"
        try:
            import keras
        except ImportError:
            os.environ["KERAS_BACKEND"] = "jax"
            import keras
        """
    )
    assert result.stdout == "keras on jax\npolicy auto\n"


def test_looking_for_keras_without_importing_it_sets_nothing(work):
    result = work.run(
        """
        from importlib.util import find_spec
        assert find_spec("keras").loader.get_filename().endswith("__init__.py")
        print("found")
        import keras
        """
    )
    assert result.stdout == "found\nkeras on None\npolicy auto\n"


def test_keras_and_the_import_system_look_untouched_afterwards(work):
    result = work.run(
        """
        import sys
        import keras, keras_mp
        for module in keras, keras_mp:
            assert type(module.__loader__).__name__ == "SourceFileLoader"
            assert module.__spec__.loader is module.__loader__
        print([type(finder).__name__ for finder in sys.meta_path])
        """
    )
    assert result.returncode == 0, result.stderr
    assert "PolicyOnKerasImport" not in result.stdout


def test_script_that_never_imports_keras_is_told_so(work):
    result = work.run("print('hello')")
    assert result.stdout == "hello\n"
    assert result.stderr == (
        "keras-mp: the script never imported keras, so no policy was set\n"
    )
    assert result.returncode == 0


def test_script_that_compiles_nothing_is_told_so(work):
    result = work.run(
        "import keras_mp.loss_scaling.summary as log; log.entries.clear()"
    )
    assert result.stderr == (
        "keras-mp: the script compiled no model with an optimizer\n"
    )


def test_summary_that_fails_changes_neither_traceback_nor_exit_status(work):
    result = work.run(
        """
        import keras_mp.loss_scaling.summary
        del keras_mp.loss_scaling.summary.lines
        raise SystemExit(3)
        """
    )
    assert "keras-mp: no summary of the optimizers: AttributeError" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.returncode == 3


# --------------------------------------------------------------------------------
# run: as `python SCRIPT ARGS`


def test_arguments_after_the_script_are_its_own_even_if_they_look_like_ours(work):
    args = ["--policy", "mine", "-h", "--", "--version", "a b", ""]
    result = work.run("import sys; print(sys.argv)", *args)
    assert result.stdout == f"{['train.py', *args]}\n"


def test_script_finds_the_modules_beside_it_and_keeps_its_working_directory(work):
    write(work.folder, {"sub/beside.py": "", "sub/data.txt": ""})
    script = work.script(
        """
        import os, sys
        import beside
        print(os.getcwd(), sys.path[0])
        """,
        "sub/train.py",
    )
    result = work.command("run", script)
    assert result.stdout == f"{work.folder} {work.folder / 'sub'}\n"


@pytest.mark.parametrize(
    "text",
    [
        "import sys; print(sys.argv, sys.path)",
        "print(sorted(k for k in globals() if k != '__annotations__'))",
        "import builtins; print(__builtins__ is builtins)",
        "print(__name__, __file__, __spec__, __package__, __cached__, __doc__)",
        "'''A docstring.'''\nx: int = 1\nprint(__doc__, __annotations__)",
        "import sys; print(sys.modules['__main__'].__dict__ is globals())",
        # no `from __future__` of ours
        "def f(x: int): pass\nprint(f.__annotations__)",
        "# -*- coding: latin-1 -*-\nprint('caf\\xe9')",
        "import atexit; atexit.register(lambda: print(__name__, TRUE))\nTRUE = 1",
        "import sys; sys.exit()",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a message')",
        "raise SystemExit(None)",
        "def f():\n    raise ValueError('bad')\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError(1) from e",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError(1)",
        "def f(:\n    pass",
        "import missing_module",
        "import importlib; importlib.import_module('missing_module')",
        "import os; os.environ['KERAS_BACKEND'] = 'broken'; import keras",
        "import sys; sys.excepthook = lambda *a: print('hook', a[0]); 1 / 0",
        "raise KeyboardInterrupt",
        "class Odd(BaseException): pass\nraise Odd",
    ],
)
@pytest.mark.parametrize("name", ["train.py", "fakes/../train.py"])
def test_script_cannot_tell_the_command_from_python(work, text, name):
    work.script(text)
    expected = work.python(name, "--flag")
    result = work.command("run", name, "--flag")
    assert result.stdout == expected.stdout
    assert without_our_lines(result.stderr) == expected.stderr
    assert result.returncode == expected.returncode


def test_classes_of_the_script_can_be_pickled_and_spawned_processes_find_them(work):
    result = work.run(
        """
        import multiprocessing, pickle

        class Point:
            x = 3

        def get(point):
            return point.x

        if __name__ == "__main__":
            print(pickle.loads(pickle.dumps(Point)) is Point)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(get, [Point()]))
        """
    )
    assert result.stdout == "True\n[3]\n", result.stderr


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("raise SystemExit(4)", 4),
        ("raise ValueError('bad')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_summary_is_the_last_thing_said_however_the_script_ends(work, ending, status):
    result = work.run(f"import keras\n{ending}")
    assert result.stderr.endswith(SUMMARY)
    assert result.stderr.count("Traceback") == (status != 4)
    assert result.returncode == status


def test_failure_inside_keras_shows_its_own_frames_and_none_of_ours(work):
    write(work.fakes, {"keras/layers.py": "1 / 0"})
    work.script("import keras")
    result = work.command("run", "train.py")
    assert without_our_lines(result.stderr) == work.python("train.py").stderr
    assert "keras_mp_cli" not in result.stderr


@pytest.mark.parametrize("script", ["missing.py", "fakes"])
def test_script_that_cannot_be_read_is_one_line_and_status_2(work, script):
    result = work.command("run", script)
    assert result.stderr.startswith(
        f"keras-mp: error: cannot read the script '{script}'"
    )
    assert result.stderr.count("\n") == 1
    assert result.returncode == 2


def test_unknown_policy_is_refused_with_the_ones_there_are(work):
    result = work.command("run", "--policy", "float16", "train.py")
    assert "mixed_bfloat16" in result.stderr
    assert result.returncode == 2


def test_run_without_a_script_is_refused(work):
    result = work.command("run")
    assert "SCRIPT" in result.stderr
    assert result.returncode == 2


# --------------------------------------------------------------------------------
# demo


def install(work: Workplace, *backends: str) -> None:
    """Makes exactly these backends importable."""
    (work.fakes / "tensorflow" / "__init__.py").unlink()
    (work.fakes / "tensorflow").rmdir()
    write(work.fakes, {f"{name}.py": "" for name in backends})


def test_demo_takes_the_first_backend_that_is_installed(work):
    install(work, "torch", "tensorflow")
    result = work.command("demo")
    assert result.stdout.splitlines()[-1] == "tensorflow 12 keras_mp_demo.png"
    assert result.returncode == 0, result.stderr


def test_demo_passes_its_options_on(work):
    install(work, "jax", "torch")
    args = ["--backend", "torch", "--epochs", "3", "--out", "fakes/a.png"]
    result = work.command("demo", *args, KERAS_BACKEND="jax")
    assert result.stdout == "keras on torch\ntorch 3 fakes/a.png\n"


def test_demo_obeys_KERAS_BACKEND_over_the_configuration_file(work):
    install(work, "jax", "tensorflow", "torch")
    write(work.folder, {".keras/keras.json": '{"backend": "tensorflow"}'})
    result = work.command("demo", KERAS_BACKEND="torch")
    assert result.stdout.startswith("keras on torch\n")


@pytest.mark.parametrize("variables", [{}, {"KERAS_BACKEND": ""}])
def test_demo_obeys_the_configuration_file_where_nobody_asked(work, variables):
    install(work, "jax", "torch")
    write(work.folder, {".keras/keras.json": '{"backend": "torch"}'})
    result = work.command("demo", **variables)
    assert result.stdout.startswith("keras on torch\n")


def test_demo_reads_the_configuration_file_from_KERAS_HOME(work):
    install(work, "jax", "torch")
    write(work.folder, {"elsewhere/keras.json": '{"backend": "torch"}'})
    result = work.command("demo", KERAS_HOME=str(work.folder / "elsewhere"))
    assert result.stdout.startswith("keras on torch\n")


@pytest.mark.parametrize(
    "text",
    [
        '{"backend": "tensorflow"}',  # Keras' own default, not installed here
        '{"backend": "numpy"}',
        '{"backend": 3}',
        "[]",
        "{not json",
    ],
)
def test_demo_goes_past_a_configuration_file_that_does_not_help(work, text):
    install(work, "jax")
    write(work.folder, {".keras/keras.json": text})
    assert work.command("demo").stdout.startswith("keras on jax\n")


@pytest.mark.parametrize(
    ("installed", "args", "variables", "message"),
    [
        ([], [], {}, "none of jax, tensorflow, torch is installed"),
        (["jax"], ["--backend", "torch"], {}, "torch is not installed"),
        (["jax"], [], {"KERAS_BACKEND": "tensorflow"}, "tensorflow is not installed"),
        (["jax"], [], {"KERAS_BACKEND": "theano"}, "Received: KERAS_BACKEND=theano"),
    ],
)
def test_demo_without_its_backend_is_one_line_and_status_2(
    work, installed, args, variables, message
):
    install(work, *installed)
    result = work.command("demo", *args, **variables)
    assert message in result.stderr
    assert result.stderr.startswith("keras-mp: error: ")
    assert result.stderr.count("\n") == 1
    assert result.returncode == 2


@pytest.mark.parametrize(
    "args",
    [
        ["--epochs", "0"],
        ["--epochs", "-1"],
        ["--epochs", "1.5"],
        ["--epochs", "many"],
        ["--out", "no/such/folder/a.png"],
        ["--out", "."],
        ["--out", ""],
        ["--backend", "theano"],
    ],
)
def test_demo_refuses_bad_values_before_it_starts(work, args):
    install(work, "jax")
    result = work.command("demo", *args)
    assert f"argument {args[0]}" in result.stderr
    assert result.stdout == ""
    assert result.returncode == 2


# --------------------------------------------------------------------------------
# inspect


def test_inspect_prints_the_inspection_of_the_file_on_the_backend_asked_for(work):
    install(work, "jax", "torch")
    write(work.folder, {"model.keras": ""})
    result = work.command("inspect", "model.keras", "--backend", "torch")
    assert result.stdout == "keras on torch\ninspected: the model\n"
    assert (result.stderr, result.returncode) == ("", 0)


def test_inspect_takes_the_first_backend_that_is_installed(work):
    install(work, "torch", "tensorflow")
    write(work.folder, {"model.keras": ""})
    result = work.command("inspect", "model.keras")
    assert result.stdout.startswith("keras on tensorflow\n")


def test_inspect_goes_on_without_what_the_model_was_compiled_with(work):
    install(work, "jax")
    write(work.folder, {"model.keras": "no such loss"})
    result = work.command("inspect", "model.keras")
    assert result.stdout == "keras on jax\ninspected: the model\n"
    assert result.stderr == (
        "keras-mp: opened without what it was compiled with: "
        "no such loss in its config\n"
    )
    assert result.returncode == 0


def test_inspect_of_a_file_that_cannot_be_opened_is_one_line_and_status_2(work):
    install(work, "jax")
    write(work.folder, {"model.keras": "damaged"})
    result = work.command("inspect", "model.keras")
    assert result.stderr == (
        "keras-mp: error: cannot open the model 'model.keras': damaged in its config\n"
    )
    assert result.returncode == 2


@pytest.mark.parametrize("path", ["missing.keras", "fakes", ""])
def test_inspect_without_a_file_is_one_line_and_status_2(work, path):
    install(work, "jax")
    result = work.command("inspect", path)
    assert result.stderr == (
        f"keras-mp: error: cannot read the model {path!r}: there is no such file\n"
    )
    assert (result.stdout, result.returncode) == ("", 2)


# --------------------------------------------------------------------------------
# compare


COMPARED = """
    import keras
    import beside

    def build():
        return "a model"

    def data():
        return "train", "validation"

    if __name__ == "__main__":
        raise SystemExit("not to be run")
"""


def compared(work, text, *args, **variables):
    """Compares what a script in a folder of its own defines."""
    write(work.folder, {"sub/beside.py": ""})
    script = work.script(text, "sub/my-train.v2.py")
    return work.command("compare", *args, script, **variables)


def test_compare_trains_what_the_script_defines_and_passes_its_options_on(work):
    install(work, "jax", "torch")
    args = ["--policies", "a,b", "--seeds", "2", "--epochs", "4", "--batch-size", "8"]
    result = compared(work, COMPARED, "--backend", "torch", "--out", "a.html", *args)
    keras, compare, shown, html = result.stdout.splitlines()
    assert keras == "keras on torch"
    options = "{'policies': ['a', 'b'], 'seeds': 2, 'epochs': 4, 'batch_size': 8}"
    assert compare == f"a model train validation {options}"
    assert shown.startswith("namespace(") and html == "html to a.html"
    assert (result.stderr, result.returncode) == ("", 0)


def test_compare_has_the_defaults_of_the_function(work):
    install(work, "jax")
    result = compared(work, COMPARED)
    assert (
        "{'policies': ['float32', 'mixed_float16', 'mixed_bfloat16'], 'seeds': 3, "
        "'epochs': 1, 'batch_size': 32}"
    ) in result.stdout
    assert "html to" not in result.stdout


def test_compare_lets_the_script_choose_its_backend(work):
    install(work, "jax", "torch")
    choosing = "import os; os.environ['KERAS_BACKEND'] = 'torch'\n"
    for variables in {}, {"KERAS_BACKEND": "jax"}:
        result = compared(work, choosing + textwrap.dedent(COMPARED), **variables)
        assert result.stdout.startswith("keras on torch\n"), result.stderr


def test_classes_of_the_compared_script_can_be_pickled(work):
    install(work, "jax")
    result = compared(
        work,
        """
        import pickle

        class Point:
            pass

        def build():
            return pickle.loads(pickle.dumps(Point())).__class__ is Point

        def data():
            return 1, 2
        """,
    )
    assert "True 1 2 {" in result.stdout, result.stderr


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        ("", [], "must define build(), which returns a compiled model"),
        ("build = print", [], "must define data(), which returns what to train with"),
        ("data = print; build = 3", [], "must define build()"),
        ("data = dict; build = print", [], "must return (train, validation). Rec"),
        (
            "import os; os.environ['KERAS_BACKEND'] = 'jax'",
            ["--backend", "torch"],
            "chooses jax itself, and not torch",
        ),
        (
            "build = print\ndef data(): return 1, 2",
            ["--policies", "refused"],
            "`policies` must be others. Received: these",
        ),
    ],
)
def test_compare_of_an_unfit_script_is_one_line_and_status_2(work, text, args, message):
    install(work, "jax", "torch")
    result = compared(work, text, *args)
    assert result.stderr.startswith("keras-mp: error: ")
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert result.returncode == 2


def test_an_error_of_the_compared_script_has_its_traceback(work):
    install(work, "jax")
    text = COMPARED.replace('return "a model"', 'raise ValueError("mine")')
    result = compared(work, text)
    assert 'raise ValueError("mine")' in result.stderr and result.returncode == 1


@pytest.mark.parametrize("script", ["missing.py", "fakes"])
def test_compare_without_a_script_is_one_line_and_status_2(work, script):
    install(work, "jax")
    result = work.command("compare", script)
    assert result.stderr == (
        f"keras-mp: error: cannot read the script {script!r}: there is no such file\n"
    )
    assert result.returncode == 2


@pytest.mark.parametrize(
    "args", [["--seeds", "0"], ["--epochs", "x"], ["--out", "no/such/a.html"]]
)
def test_compare_refuses_bad_values_before_it_starts(work, args):
    install(work, "jax")
    result = compared(work, COMPARED, *args)
    assert f"argument {args[0]}" in result.stderr
    assert (result.stdout, result.returncode) == ("", 2)


# --------------------------------------------------------------------------------
# the command itself


COMMANDS = ("run", "demo", "inspect", "replay", "doctor", "compare")


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_is_there_and_loads_nothing(work, args):
    result = work.command(*args)
    assert "usage: keras-mp" in result.stdout
    assert result.returncode == 0


def test_command_without_a_command_is_refused(work):
    result = work.command()
    assert "COMMAND" in result.stderr
    assert result.returncode == 2


def test_module_can_be_run_with_dash_m(work):
    work.script("import sys; import keras; print(sys.argv, sys.path[0])")
    path = os.pathsep.join(map(str, (work.fakes, work.command_file.parent)))
    args = ["-m", "keras_mp_cli", "run", "train.py", "x"]
    result = work.python(*args, PYTHONPATH=path)
    assert result.stdout.endswith(f"['train.py', 'x'] {work.folder}\n"), result.stderr
    assert result.stderr == SUMMARY


def test_version_is_that_of_the_installed_package(tmp_path):
    try:
        version = importlib.metadata.version("keras_mp")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    else:
        assert version == importlib.import_module("keras_mp").__version__
    result = real("--version", home=tmp_path)
    assert result.stdout == f"keras-mp {version}\n"


# --------------------------------------------------------------------------------
# with the real Keras


def real(*args: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command with everything that is installed, on this test run's backend."""
    if "KERAS_BACKEND" in os.environ:
        variables = {"KERAS_BACKEND": os.environ["KERAS_BACKEND"]} | variables
    return subprocess.run(
        [sys.executable, str(COMMAND), *args],
        cwd=home,
        env=environment(home, ROOT, **variables),
        capture_output=True,
        text=True,
    )


TRAIN = """
    import os, sys
    for argument in sys.argv[1:]:
        os.environ["KERAS_BACKEND"] = argument
    import numpy as np
    import keras
    from keras import layers

    print(keras.backend.backend(), keras.config.dtype_policy().name)
    model = keras.Sequential(
        [layers.Dense(4, activation="relu"), layers.Dense(3, activation="softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    x = np.random.default_rng(0).normal(size=(16, 5)).astype("float32")
    model.fit(x, np.arange(16) % 3, batch_size=8, epochs=1, verbose=0)
"""


def test_real_script_trains_in_float16_and_its_optimizer_is_summarized(tmp_path):
    write(tmp_path, {"train.py": TRAIN})
    result = real("run", "--policy", "mixed_float16", "train.py", home=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(" mixed_float16\n")
    summary = result.stderr.splitlines()[-1]
    assert summary.startswith("keras-mp: ")
    assert summary.endswith(": loss scale 32768, 2 steps, 0 skipped")


@pytest.mark.once
@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_real_script_chooses_its_backend_itself(tmp_path, backend):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    write(tmp_path, {"train.py": TRAIN})
    result = real(
        "run", "--policy", "mixed_bfloat16", "train.py", backend, home=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"{backend} mixed_bfloat16\n")
    assert result.stderr.endswith(": no loss scaling, 2 steps\n")


@pytest.mark.once
def test_real_tensorflow_imports_keras_lazily_and_the_policy_is_set(tmp_path):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    text = """
        from tensorflow import keras
        print(keras.config.dtype_policy().name)
    """
    write(tmp_path, {"train.py": text})
    result = real(
        "run",
        "--policy",
        "mixed_float16",
        "train.py",
        home=tmp_path,
        KERAS_BACKEND="tensorflow",
    )
    assert result.stdout.endswith("mixed_float16\n"), result.stderr


@keras.saving.register_keras_serializable(package="tests_cli")
class OfMyOwn(keras.layers.Layer):
    def call(self, x):
        return x + 1


def test_real_model_is_inspected_as_the_function_does_it(tmp_path):
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(3)]
        )
    model.compile("adam", "mse")
    model.save(tmp_path / "model.keras")
    reopened = keras.models.load_model(tmp_path / "model.keras")
    result = real("inspect", "model.keras", home=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{keras_mp.inspect(reopened)}\n"
    assert "float16" in result.stdout


@pytest.mark.once
def test_real_model_with_a_class_of_its_own_is_one_line_and_status_2(tmp_path):
    model = keras.Sequential([keras.Input((5,)), OfMyOwn()])
    model.save(tmp_path / "model.keras")
    result = real("inspect", "model.keras", home=tmp_path)
    (line,) = [x for x in result.stderr.splitlines() if x.startswith("keras-mp: ")]
    assert line.startswith("keras-mp: error: cannot open the model 'model.keras': ")
    assert "OfMyOwn" in line
    assert "Traceback" not in result.stderr
    assert (result.stdout, result.returncode) == ("", 2)


@pytest.mark.once
@pytest.mark.parametrize("text", ["", "not a model"])
def test_real_file_that_is_damaged_is_one_line_and_status_2(tmp_path, text):
    write(tmp_path, {"model.keras": text})
    result = real("inspect", "model.keras", home=tmp_path)
    assert "keras-mp: error: cannot open the model 'model.keras': " in result.stderr
    assert "Traceback" not in result.stderr
    assert (result.stdout, result.returncode) == ("", 2)
