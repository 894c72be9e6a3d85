"""The `keras-mp` command, and its commands but `run`."""

import importlib
import importlib.metadata
import textwrap

import keras
import pytest
from workplace import SUMMARY, install, real, refusal, write

import keras_mp
from keras_mp_cli import arguments

# --------------------------------------------------------------------------------
# demo


@pytest.mark.parametrize(
    ("args", "printed"),
    [
        (["demo"], "tensorflow 12 keras_mp_demo.png"),
        (["inspect", "model.keras"], "inspected: the model"),
    ],
)
def test_the_first_backend_that_is_installed_is_taken(work, args, printed):
    install(work, "torch", "tensorflow")
    write(work.folder, {"model.keras": ""})
    result = work.command(*args)
    assert result.stdout == f"keras on tensorflow\n{printed}\n"
    assert result.returncode == 0, result.stderr


def test_demo_passes_its_options_on(work):
    install(work, "jax", "torch")
    args = ["--backend", "torch", "--epochs", "3", "--out", "fakes/a.png"]
    result = work.command("demo", *args, KERAS_BACKEND="jax")
    assert result.stdout == "keras on torch\ntorch 3 fakes/a.png\n"


@pytest.mark.parametrize(
    ("text", "variables", "expected"),
    [
        ('{"backend": "jax"}', {"KERAS_BACKEND": "torch"}, "torch"),
        ('{"backend": "torch"}', {"KERAS_BACKEND": ""}, "torch"),
        ('{"backend": "torch"}', {}, "torch"),
        # Keras' own default, not installed here.
        ('{"backend": "tensorflow"}', {}, "jax"),
        ('{"backend": "numpy"}', {}, "jax"),
        ('{"backend": 3}', {}, "jax"),
        ("[]", {}, "jax"),
        ("{not json", {}, "jax"),
    ],
)
def test_demo_obeys_KERAS_BACKEND_and_then_a_configuration_file_that_helps(
    work, text, variables, expected
):
    install(work, "jax", "torch")
    write(work.folder, {".keras/keras.json": text})
    result = work.command("demo", **variables)
    assert result.stdout.startswith(f"keras on {expected}\n")


def test_demo_reads_the_configuration_file_from_KERAS_HOME(work):
    install(work, "jax", "torch")
    write(work.folder, {"elsewhere/keras.json": '{"backend": "torch"}'})
    result = work.command("demo", KERAS_HOME=str(work.folder / "elsewhere"))
    assert result.stdout.startswith("keras on torch\n")


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
    assert message in refusal(work.command("demo", *args, **variables))


# --------------------------------------------------------------------------------
# inspect


def test_inspect_prints_the_inspection_of_the_file_on_the_backend_asked_for(work):
    install(work, "jax", "torch")
    write(work.folder, {"model.keras": ""})
    result = work.command("inspect", "model.keras", "--backend", "torch")
    assert result.stdout == "keras on torch\ninspected: the model\n"
    assert (result.stderr, result.returncode) == ("", 0)


def test_inspect_prints_every_layer_on_request(work):
    install(work, "jax")
    write(work.folder, {"model.keras": ""})
    result = work.command("inspect", "--all", "model.keras")
    assert result.stdout == "keras on jax\ninspected whole: the model\n"


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
    line = refusal(work.command("inspect", "model.keras"), "keras on jax\n")
    assert line == "cannot open the model 'model.keras': damaged in its config"


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


def test_a_result_that_cannot_be_written_is_shown_and_then_named(work):
    install(work, "jax")
    result = compared(work, COMPARED, "--out", "full.html")
    _, _, shown = result.stdout.splitlines()
    assert shown.startswith("namespace(")
    line = refusal(result, printed=result.stdout)
    assert line == "cannot write 'full.html': No space left on device"


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
    assert message in refusal(compared(work, text, *args), "keras on jax\n")


def test_an_error_of_the_compared_script_has_its_traceback(work):
    install(work, "jax")
    text = COMPARED.replace('return "a model"', 'raise ValueError("mine")')
    result = compared(work, text)
    assert 'raise ValueError("mine")' in result.stderr and result.returncode == 1


# --------------------------------------------------------------------------------
# the command itself


@pytest.mark.parametrize(
    ("command", "what", "path"),
    [
        *(("inspect", "model", path) for path in ("missing.keras", "fakes", "")),
        *(("compare", "script", path) for path in ("missing.py", "fakes")),
    ],
)
def test_without_its_file_a_command_is_one_line_and_status_2(work, command, what, path):
    install(work, "jax")
    line = refusal(work.command(command, path))
    assert line == f"cannot read the {what} {path!r}: there is no such file"


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("demo", "--epochs", "0"),
        ("demo", "--epochs", "-1"),
        ("demo", "--epochs", "1.5"),
        ("demo", "--epochs", "many"),
        ("demo", "--out", "no/such/folder/a.png"),
        ("demo", "--out", "."),
        ("demo", "--out", ""),
        ("demo", "--backend", "theano"),
        ("compare", "--seeds", "0"),
        ("compare", "--epochs", "x"),
        ("compare", "--out", "no/such/a.html"),
    ],
)
def test_bad_values_are_refused_before_anything_starts(work, command, option, value):
    install(work, "jax")
    script = [work.script(COMPARED)] if command == "compare" else []
    result = work.command(command, option, value, *script)
    assert f"argument {option}" in result.stderr
    assert (result.stdout, result.returncode) == ("", 2)


@pytest.mark.parametrize("exists", [False, True])
def test_a_file_that_may_not_be_written_is_refused(
    exists, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "a.png"
    if exists:
        path.touch()
    # Root may write everywhere.
    closed = {str(path if exists else tmp_path)}
    monkeypatch.setattr("os.access", lambda path, mode: path not in closed)
    with pytest.raises(SystemExit):
        arguments.parsed(["demo", "--out", str(path)])
    assert f"must be a file that you may write. Received: {path}" in (
        capsys.readouterr().err
    )


COMMANDS = ("run", "demo", "inspect", "replay", "doctor", "compare")


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_is_there_and_loads_nothing(work, args):
    result = work.command(*args)
    assert "usage: keras-mp" in result.stdout
    assert "keras on" not in result.stdout
    assert result.returncode == 0


def test_it_imports_only_the_standard_library_before_it_needs_keras(work):
    work.script(
        """
        import contextlib, sys
        import keras_mp_cli
        with contextlib.suppress(SystemExit):
            keras_mp_cli.main(sys.argv[1:])
        loaded = {name.partition(".")[0] for name in sys.modules}
        print(sorted(loaded - sys.stdlib_module_names))
        """
    )
    for args in ["--version"], ["compare", "nothing.py"], ["run", "nothing.py"]:
        *_, loaded = work.python("train.py", *args).stdout.splitlines()
        assert loaded == "['__main__', 'keras_mp_cli']"


def test_command_without_a_command_is_refused(work):
    result = work.command()
    assert "COMMAND" in result.stderr
    assert result.returncode == 2


def test_module_can_be_run_with_dash_m(work):
    work.script("import sys; import keras; print(sys.argv, sys.path[0])")
    result = work.python("-m", "keras_mp_cli", "run", "train.py", "x")
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


@pytest.mark.once("The command reads a file before any backend computes.")
def test_real_model_with_a_class_of_its_own_is_one_line_and_status_2(tmp_path):
    model = keras.Sequential([keras.Input((5,)), OfMyOwn()])
    model.save(tmp_path / "model.keras")
    line = refusal(real("inspect", "model.keras", home=tmp_path), alone=False)
    assert line.startswith("cannot open the model 'model.keras': ")
    assert "OfMyOwn" in line


@pytest.mark.once("The command reads a file before any backend computes.")
@pytest.mark.parametrize("text", ["", "not a model"])
def test_real_file_that_is_damaged_is_one_line_and_status_2(tmp_path, text):
    write(tmp_path, {"model.keras": text})
    line = refusal(real("inspect", "model.keras", home=tmp_path), alone=False)
    assert line.startswith("cannot open the model 'model.keras': ")
