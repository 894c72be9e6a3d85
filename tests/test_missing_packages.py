"""What is not installed is named in one sentence, with the pip line."""

import importlib

import pytest
from backends import BACKEND
from workplace import python, refusal

from keras_mp import errors
from keras_mp_cli import backends

NO_BACKEND = (
    "Keras needs a backend, and none of jax, tensorflow, torch is installed: "
    "pip install jax"
)
DRAWING = "Drawing needs matplotlib: pip install matplotlib"


def without(packages, program, *args, **variables):
    """Runs a program in an interpreter that does not find the packages."""
    lines = [line[4:] for line in program.splitlines() if line]
    blocked = [f"import sys; sys.modules[{name!r}] = None" for name in packages]
    variables = {"KERAS_BACKEND": BACKEND, **variables}
    return python("\n".join([*blocked, *lines]), *args, **variables)


def error_of(done):
    """The message of the one error that ended the program."""
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    kind, message = done.stderr.splitlines()[-1].split(": ", 1)
    assert kind == "keras_mp.errors.MissingPackageError"
    return message


@pytest.mark.once("What is missing is told before a backend computes.")
@pytest.mark.parametrize(
    ("package", "program", "sentence"),
    [
        (
            "matplotlib",
            "    from keras_mp.tools.display.plots import plot_training",
            DRAWING,
        ),
        ("rich", "    import keras_mp", "keras_mp needs rich: pip install rich"),
        (
            "sklearn",
            "    from keras_mp_cli.demo import demo\n    demo(epochs=1)",
            "The demo needs scikit-learn: pip install scikit-learn",
        ),
    ],
)
def test_a_missing_package_is_one_sentence(package, program, sentence):
    assert error_of(without([package], program)) == sentence


def test_an_error_within_an_installed_package_is_left_as_it_is():
    """Here matplotlib is there, and something that it needs is not."""
    done = without(["numpy.ma"], "    import keras_mp.tools.display.plots")
    assert "ModuleNotFoundError: import of numpy.ma halted" in done.stderr
    assert "pip install" not in done.stderr


def test_a_part_that_an_installed_backend_lacks_is_named():
    """Not "The backend is not installed": that would lead nowhere."""
    lacking = f"{BACKEND}.no_such_part"
    with pytest.raises(ModuleNotFoundError, match=lacking) as raised:
        with errors.needed("Keras", BACKEND):
            importlib.import_module(lacking)
    assert not isinstance(raised.value, errors.MissingPackageError)


BACKENDS = ["jax", "tensorflow", "torch"]


@pytest.mark.once("What is missing is told before a backend computes.")
def test_the_command_and_keras_mp_know_the_same_backends():
    assert [*backends.BACKENDS] == [*errors.BACKENDS] == BACKENDS


def test_without_any_backend_the_import_is_one_sentence():
    assert error_of(without(BACKENDS, "    import keras_mp")) == NO_BACKEND


def test_without_its_backend_the_import_names_one_that_is_installed():
    others = [b for b in BACKENDS if b != BACKEND]
    done = without([BACKEND, others[1]], "    import keras_mp")
    assert error_of(done) == (
        f"The backend {BACKEND} is not installed: pip install {BACKEND}, "
        f"or set KERAS_BACKEND={others[0]}"
    )


COMMAND = """
    from keras_mp_cli import main
    main(sys.argv[1:])
"""


@pytest.mark.trains_many
@pytest.mark.parametrize(
    ("packages", "backend", "sentence"),
    [
        (["rich"], BACKEND, "keras_mp needs rich: pip install rich"),
        (
            ["sklearn"],
            BACKEND,
            "The demo needs scikit-learn: pip install scikit-learn",
        ),
        (BACKENDS, "", NO_BACKEND),
        (BACKENDS, BACKEND, NO_BACKEND),
    ],
)
def test_the_demo_without_what_it_needs_is_one_line_and_status_2(
    packages, backend, sentence
):
    done = without(packages, COMMAND, "demo", KERAS_BACKEND=backend)
    assert refusal(done, alone=False) == sentence


@pytest.mark.once("What is missing is told before a backend computes.")
@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_script_without_any_backend_is_not_started(command, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('started')\nimport keras\n")
    done = without(BACKENDS, COMMAND, command, str(script), KERAS_BACKEND="")
    assert refusal(done, alone=False) == NO_BACKEND


def test_a_script_that_chooses_a_backend_that_is_missing_is_told_so(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"import os\nos.environ['KERAS_BACKEND'] = {BACKEND!r}\n")
    with script.open("a") as file:
        file.write("import keras\n")
    others = [b for b in BACKENDS if b != BACKEND]
    done = without([BACKEND, others[1]], COMMAND, "run", str(script))
    assert done.stderr.count("Traceback") == 1 and done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"keras-mp: The backend {BACKEND} is not installed: pip install "
        f"{BACKEND}, or set KERAS_BACKEND={others[0]}"
    )
