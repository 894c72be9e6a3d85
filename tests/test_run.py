"""`keras-mp run`: an unmodified script under a policy."""

import importlib.util
import os
import re
import signal

import pytest
from workplace import OPTIMIZER, ROOT, SUMMARY, install, real, refusal, write

once = pytest.mark.once("The script that is started chooses a backend itself.")


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
        "from keras_mp.loss_scaling import summary",
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


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_policy_is_the_one_that_was_asked_for(work, policy):
    script = work.script("import keras")
    result = work.command("run", "--policy", policy, script)
    assert f"policy {policy}\n" in result.stdout


def test_policy_that_the_script_sets_itself_wins(work):
    result = work.run(
        """
        import keras, keras_mp
        keras_mp.set_global_policy("float32")
        print(keras_mp.global_policy().name)
        """
    )
    assert result.stdout.endswith("policy float32\nfloat32\n")


def test_script_may_try_another_backend_when_the_first_cannot_be_imported(work):
    install(work, "jax")
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
        "keras-mp: the script itself never imported keras, so no policy was set\n"
    )
    assert result.returncode == 0


def test_script_whose_import_of_keras_fails_is_told_so(work):
    result = work.run("import keras", KERAS_BACKEND="broken")
    assert result.stderr.endswith(
        "ImportError: no such backend\n"
        "keras-mp: the import of keras failed, so no policy was set\n"
    )
    assert result.returncode == 1


def test_script_that_compiles_nothing_is_told_so(work):
    result = work.run(
        "import keras_mp.loss_scaling.summary as log; log.entries.clear()"
    )
    assert result.stderr == (
        "keras-mp: the script itself compiled no model with an optimizer\n"
        "keras-mp: policy auto: because\n"
    )


@pytest.mark.parametrize("ending", ["1 / 0", "raise SystemExit('bad')"])
def test_script_that_fails_is_not_told_that_it_compiles_nothing(work, ending):
    emptied = "import keras_mp.loss_scaling.summary as log; log.entries.clear()"
    result = work.run(f"{emptied}\n{ending}")
    assert "compiled no model" not in result.stderr
    assert "keras-mp: policy auto: because\n" in result.stderr


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
# run: the backend


@pytest.mark.parametrize(
    ("installed", "configured", "expected"),
    [
        (["jax"], None, "jax"),
        (["torch"], None, "torch"),
        (["jax", "torch"], "torch", "None"),  # Keras reads the file itself.
        (["jax"], "tensorflow", "jax"),  # As Keras writes it.
        (["jax", "tensorflow"], None, "None"),  # As without the command.
    ],
)
def test_without_a_word_of_the_user_keras_gets_a_backend_that_is_installed(
    work, installed, configured, expected
):
    install(work, *installed)
    if configured:
        write(work.folder, {".keras/keras.json": f'{{"backend": "{configured}"}}'})
    result = work.run("import keras")
    assert result.stdout == f"keras on {expected}\npolicy auto\n", result.stderr
    assert result.stderr == SUMMARY


@pytest.mark.parametrize(
    ("args", "variables", "script", "expected"),
    [
        (["--backend", "torch"], {}, "", "torch"),
        (["--backend", "torch"], {"KERAS_BACKEND": "jax"}, "", "torch"),
        ([], {"KERAS_BACKEND": "torch"}, "", "torch"),
        ([], {"KERAS_BACKEND": "jax"}, "e['KERAS_BACKEND'] = 'torch'", "torch"),
        ([], {}, "e.setdefault('KERAS_BACKEND', 'torch')", "torch"),
        (["--backend", "jax"], {}, "e.setdefault('KERAS_BACKEND', 'torch')", "jax"),
        (["--backend", "jax"], {}, "e['KERAS_BACKEND'] = 'torch'", "torch"),
    ],
)
def test_the_script_wins_over_the_option_and_says_so_and_that_over_the_environment(
    work, args, variables, script, expected
):
    install(work, "jax", "torch")
    not_yet = 'assert not {"keras", "keras_mp", "numpy"} & set(sys.modules)'
    start = f"import sys; {not_yet}\nfrom os import environ as e"
    name = work.script(f"{start}\n{script}\nimport keras")
    result = work.command("run", *args, name, **variables)
    assert result.stdout == f"keras on {expected}\npolicy auto\n", result.stderr
    said = ""
    if args and args[1] != expected:
        said = f"keras-mp: the script chooses {expected} itself, and not {args[1]}\n"
    assert result.stderr == said + SUMMARY


# --------------------------------------------------------------------------------
# run: as `python SCRIPT ARGS`


def test_arguments_after_the_script_are_its_own_even_if_they_look_like_ours(work):
    args = ["--policy", "mine", "--backend", "x", "-h", "--", "--version", "a b", ""]
    result = work.run("import sys; print(sys.argv)", *args)
    assert result.stdout == f"{['train.py', *args]}\n"
    assert "stands after" not in result.stderr


@pytest.mark.parametrize(
    "args",
    [["--policy", "mixed_float16"], ["--policy=mixed_float16"], ["--backend", "jax"]],
)
def test_an_option_of_ours_after_the_script_is_named(work, args):
    result = work.run("import sys; print(sys.argv)", "--epochs", "3", *args)
    assert result.stdout == f"{['train.py', '--epochs', '3', *args]}\n"
    given = " ".join(args).replace("=", " ")
    assert result.stderr.startswith(
        f"keras-mp: {given} stands after train.py, which gets it. "
        f"For keras-mp: keras-mp run {given} train.py\n"
    )


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


# --------------------------------------------------------------------------------
# run: the processes that the script starts


IN_A_PROCESS = """
    import multiprocessing, subprocess, sys
    import keras

    def work():
        import keras_mp
        print("works under", keras_mp.global_policy().name, flush=True)

    if __name__ == "__main__":
        if sys.argv[1] == "subprocess":
            program = "import train; train.work()"
            subprocess.run([sys.executable, "-c", program], check=True)
        else:
            process = multiprocessing.get_context(sys.argv[1]).Process(target=work)
            process.start()
            process.join()
"""


@pytest.mark.parametrize("start", ["spawn", "forkserver", "fork", "subprocess"])
def test_the_processes_of_the_script_have_its_policy(work, start):
    script = work.script(IN_A_PROCESS)
    args = "run", "--policy", "mixed_bfloat16", script, start
    result = work.command(*args, flags=())
    assert "works under mixed_bfloat16\n" in result.stdout, result.stderr
    summary = SUMMARY.replace("auto", "mixed_bfloat16")
    assert result.stderr.endswith(summary)
    trained = result.stderr.removesuffix(summary)
    # Those that are forked end without what is registered for the end of a process.
    if start in ("spawn", "subprocess"):
        line = OPTIMIZER.removeprefix("keras-mp: ")
        assert re.fullmatch(rf"keras-mp: process \d+: {re.escape(line)}", trained)
    else:
        assert trained == ""


def test_the_processes_of_the_script_start_as_they_would(work):
    """`sys.path`, and a module that Python imports at its start, are the user's."""
    write(work.fakes, {"sitecustomize.py": "print('the own start')"})
    script = work.script(
        """
        import subprocess, sys
        program = "import sys, sitecustomize; print(sys.path, sitecustomize.__file__)"
        subprocess.run([sys.executable, "-c", program])
        """
    )
    expected = work.python(script, flags=())
    result = work.command("run", script, flags=())
    assert result.stdout == expected.stdout
    assert result.stdout.startswith("the own start\n")
    assert without_our_lines(result.stderr) == expected.stderr == ""


def test_the_python_of_another_environment_starts_without_a_word(work):
    hidden = """
        import os, sys
        if "KERAS_MP_RUN_POLICY" in os.environ:
            sys.modules["keras_mp_cli"] = None
        """
    write(work.fakes, {"sitecustomize.py": hidden})
    text = """
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "import keras"])
        """
    result = work.run(text, flags=())
    assert (result.stdout, without_our_lines(result.stderr)) == ("keras on None\n", "")


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


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--backend", "torch", "train.py"], "The backend torch is not inst"),
        (["missing.py"], "cannot read the script 'missing.py'"),
        (["fakes"], "cannot read the script 'fakes'"),
    ],
)
def test_what_is_not_there_is_one_line_and_status_2(work, args, error):
    install(work, "jax")
    work.script("print('ran')")
    assert refusal(work.command("run", *args)).startswith(error)


def test_unknown_policy_is_refused_with_the_ones_there_are(work):
    result = work.command("run", "--policy", "float16", "train.py")
    assert "mixed_bfloat16" in result.stderr and "Did you mean" not in result.stderr
    assert result.returncode == 2


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("mixed-float16", "mixed_float16"),
        ("MIXED_FLOAT16", "mixed_float16"),
        ("mixed_bfloat16 ", "mixed_bfloat16"),
        ("half", "mixed_float16"),
        ("bf16", "mixed_bfloat16"),
    ],
)
def test_a_policy_in_another_spelling_is_guessed(work, name, meant):
    result = work.command("run", "--policy", name, "train.py")
    assert f"Received: {name}. Did you mean {meant}?" in result.stderr
    assert result.returncode == 2


@pytest.mark.parametrize("command", ["run", "demo", "inspect", "compare", "doctor"])
def test_an_unknown_option_shows_the_usage_of_its_command(work, command):
    file = [] if command in ("demo", "doctor") else ["file"]
    result = work.command(command, "--unknown", *file)
    assert result.stderr.startswith(f"usage: keras-mp {command} ")
    assert f"keras-mp {command}: error: unrecognized arguments: --unkn" in result.stderr
    assert result.returncode == 2


def test_run_without_a_script_is_refused(work):
    result = work.command("run")
    usage, error = result.stderr.splitlines()
    assert usage.endswith(" SCRIPT [ARGS ...]")
    assert error == "keras-mp run: error: the following arguments are required: SCRIPT"
    assert result.returncode == 2


# --------------------------------------------------------------------------------
# with the real Keras


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


def real_run(home, policy, *args, text=TRAIN, **variables):
    write(home, {"train.py": text})
    args = ("run", "--policy", policy, "train.py", *args)
    result = real(*args, home=home, **variables)
    assert result.returncode == 0, result.stderr
    return result


def test_real_script_trains_in_float16_and_its_optimizer_is_summarized(tmp_path):
    result = real_run(tmp_path, "mixed_float16")
    assert result.stdout.endswith(" mixed_float16\n")
    summary, policy = result.stderr.splitlines()[-2:]
    assert summary.startswith("keras-mp: ")
    assert summary.endswith(": loss scale 32768, 2 steps, 0 skipped")
    assert policy == "keras-mp: policy mixed_float16: as --policy says"


@pytest.mark.parametrize(
    ("policy", "line", "said"),
    [
        ("auto", "", r"policy \w+: .*[.]"),
        ("mixed_float16", "keras.config.set_dtype_policy('mixed_bfloat16')",
         "policy mixed_bfloat16: the script sets it itself, and --policy is not used"),
        ("auto", "import keras_mp; keras_mp.set_global_policy('mixed_bfloat16')",
         "policy mixed_bfloat16: the script sets it itself, and --policy is not used"),
        ("bfloat16", "import keras_mp; keras_mp.set_global_policy('bfloat16')",
         "policy bfloat16: as --policy says"),
    ],
)  # fmt: skip
@pytest.mark.slow("Each row is a script in a process of its own.")
def test_real_script_is_told_its_policy_and_why(tmp_path, policy, line, said):
    result = real_run(tmp_path, policy, text=f"import keras\n{line}\n")
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(f"keras-mp: {said}", last), result.stderr


@once
@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
@pytest.mark.slow("Each row is a script in a process of its own.")
def test_real_script_chooses_its_backend_itself(tmp_path, backend):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    result = real_run(tmp_path, "mixed_bfloat16", backend)
    assert result.stdout.endswith(f"{backend} mixed_bfloat16\n")
    assert ": no loss scaling, 2 steps\nkeras-mp: policy" in result.stderr


@once
@pytest.mark.slow("A script in a process of its own.")
def test_real_script_runs_where_only_one_backend_is_installed(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    hidden = """
        import importlib.util

        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: (
            None if name in ("jax", "tensorflow") else find(name, package)
        )
    """
    write(tmp_path, {"hiding/sitecustomize.py": hidden})
    path = os.pathsep.join([str(tmp_path / "hiding"), str(ROOT)])
    result = real_run(tmp_path, "mixed_bfloat16", KERAS_BACKEND="", PYTHONPATH=path)
    assert result.stdout.endswith("torch mixed_bfloat16\n")


@once
@pytest.mark.slow("A script that starts others.")
def test_real_spawned_processes_train_in_float16_and_say_so(tmp_path):
    text = """
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        import numpy as np
        import keras

        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])

        def train(rank):
            model.compile("sgd", "mse")
            model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
            return [layer.compute_dtype for layer in model.layers]

        if __name__ == "__main__":
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                print(*pool.map(train, range(2)))
    """
    result = real_run(tmp_path, "mixed_float16", text=text)
    assert result.stdout == "['float16', 'float32'] ['float16', 'float32']\n"
    said = [line for line in result.stderr.splitlines() if "process" in line]
    trained = r"keras-mp: process \d+: sgd: loss scale \d+, 1 steps, \d skipped"
    assert re.fullmatch(trained, said[0])


@once
@pytest.mark.slow("A script in a process of its own.")
def test_real_tensorflow_imports_keras_lazily_and_the_policy_is_set(tmp_path):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    text = """
        from tensorflow import keras
        print(keras.config.dtype_policy().name)
    """
    result = real_run(tmp_path, "mixed_float16", text=text, KERAS_BACKEND="tensorflow")
    assert result.stdout.endswith("mixed_float16\n"), result.stderr
