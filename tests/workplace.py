"""Runs the `keras-mp` command as a user runs it: as a process of its own.

Most tests of the command run it with a Keras of a few lines, so that they take
milliseconds and show what the command itself does; `real` runs it with all of Keras.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

# They print what is imported and set, in order.
FAKES = {
    "keras/__init__.py": """
        import os
        if os.environ.get("KERAS_BACKEND") == "broken":
            raise ImportError("no such backend")
        if os.environ.get("KERAS_BACKEND"):
            __import__(os.environ["KERAS_BACKEND"])
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
        from keras_mp.errors import BACKENDS, needed
        with needed("keras_mp", *BACKENDS):
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
            def text(every_layer):
                return f"inspected{' whole' if every_layer else ''}: {model}"
            return SimpleNamespace(text=text)
        from keras_mp.tools import compare
    """,
    "keras_mp/tools.py": """
        from types import SimpleNamespace
        def compare(build, train, validation, **options):
            if options["policies"] == ["refused"]:
                raise ValueError("`policies` must be others.\\nReceived: these")
            print(build(), train, validation, options)
            def to_html(path):
                if path == "full.html":
                    raise OSError(28, "No space left on device", path)
                print("html to", path)
            return SimpleNamespace(to_html=to_html)
    """,
    "keras_mp/loss_scaling/summary.py": """
        entries = None
        def start():
            global entries
            entries = ["adam: loss scale 8, 5 steps, 1 skipped"]
        def lines():
            return entries
        def of_policy(asked):
            return f"policy {asked}: because"
    """,
    "keras_mp/loss_scaling/__init__.py": "",
    "keras_mp_cli/demo.py": """
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
OPTIMIZER = "keras-mp: adam: loss scale 8, 5 steps, 1 skipped\n"
SUMMARY = f"{OPTIMIZER}keras-mp: policy auto: because\n"


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
        # The command is copied: beside the original is the real package.
        for part in "keras_mp_cli/**/*.py", "keras_mp/errors.py":
            for path in ROOT.glob(part):
                write(self.fakes, {str(path.relative_to(ROOT)): path.read_text()})
        write(self.fakes, FAKES)
        # As pip writes it.
        self.command_file = folder / "bin" / "keras-mp"
        write(folder, {"bin/keras-mp": "from keras_mp_cli import main\nmain()"})

    def script(self, text: str, name: str = "train.py") -> str:
        write(self.folder, {name: text})
        return name

    def python(
        self, *args: str, flags: tuple[str, ...] = ("-S",), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            # -S: without what is installed, the real Keras above all
            [sys.executable, *flags, *args],
            cwd=self.folder,
            env=environment(self.folder, self.fakes, **variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def command(self, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.python(str(self.command_file), *args, **options)

    def run(self, text: str, *args: str, **options: Any):
        """Runs a script under the command."""
        return self.command("run", self.script(text), *args, **options)


def install(work: Workplace, *backends: str) -> None:
    """Makes exactly these backends importable."""
    (work.fakes / "tensorflow" / "__init__.py").unlink()
    (work.fakes / "tensorflow").rmdir()
    write(work.fakes, {f"{name}.py": "" for name in backends})


def environment(home: Path, *folders: Path, **variables: str) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("KERAS_BACKEND", "KERAS_HOME") and not name.startswith("PYTHON")
    }
    path = os.pathsep.join(map(str, folders))
    return inherited | {"HOME": str(home), "PYTHONPATH": path} | variables


def block(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Lets imports of an installed package fail, and what has drawn with it as well."""
    for name in [package, *sys.modules]:
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
        elif name.startswith("keras_mp.tools.display.plots"):
            monkeypatch.delitem(sys.modules, name)


def refusal(
    done: subprocess.CompletedProcess[str], printed: str = "", alone: bool = True
) -> str:
    """The one line of a command that refuses; alone, there is nothing else on stderr.

    TensorFlow has more to say.
    """
    assert (done.stdout, done.returncode) == (printed, 2), done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 1 or not alone, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in said if line.startswith("keras-mp: ")]
    assert line.startswith("keras-mp: error: ")
    return line.removeprefix("keras-mp: error: ")


def python(
    program: str, *args: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program with everything that is installed."""
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def real(*args: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command with everything that is installed, on this test run's backend."""
    if "KERAS_BACKEND" in os.environ:
        variables = {"KERAS_BACKEND": os.environ["KERAS_BACKEND"]} | variables
    return subprocess.run(
        [sys.executable, "-m", "keras_mp_cli", *args],
        cwd=home,
        env=environment(home, ROOT, **variables),
        capture_output=True,
        text=True,
    )
