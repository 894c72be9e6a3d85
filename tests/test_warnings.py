"""Each warning names the line of the user's that led to it: here, a line of this file.

A traceback printed with `python -W error`, and the line under the warning, are of use
only then.
"""

import ast
import inspect
import linecache
import threading
import warnings

import keras
import numpy as np
import pytest
from backends import BACKEND
from keras import layers, ops
from test_layering import modules

import keras_mp
from keras_mp import installing, messages, sharding, still_kernels
from keras_mp.backends.train_step import next_calls
from keras_mp.callbacks import LossScaleMonitor, OverflowBreakpoint
from keras_mp.tables import Table
from keras_mp.tools.breakpoint import model_file
from keras_mp.traced.function import TracedFunction

X, Y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")
NAN = np.full_like(X, np.nan)


def scaled(optimizer="sgd"):
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


def fit(model, *callbacks, x=X, **options):
    keras.utils.set_random_seed(0)
    model.fit(x, Y, batch_size=4, verbose=0, callbacks=list(callbacks), **options)


def load_what_was_saved_of(other, folder):
    fit(other)
    other.save_weights(folder / "model.weights.h5")
    model = scaled()
    fit(model)
    model.load_weights(folder / "model.weights.h5")


# One a call of `warn` in keras_mp, by module and function ------------------------

CALLS = {}


def provokes(where, said, line):
    """Enters a function: what it provokes, and the line that this has to name.

    Of the warning and of the line a part is given.
    """

    def enter(function):
        CALLS[where] = function, said, line
        return function

    return enter


@provokes(
    "loss_scaling.skip_watch.look",
    "were skipped because the loss is not finite",
    "model.fit(",
)
def nan_in_fit(folder, monkeypatch):
    fit(scaled(), x=NAN)


@provokes(
    "loss_scaling.resuming.warn_of_another",
    "Skipping variable loading for optimizer 'loss_scale",
    "model.load_weights(",
)
def another_optimizers_checkpoint(folder, monkeypatch):
    load_what_was_saved_of(scaled("adam"), folder)


@provokes(
    "loss_scaling.checkpoint._counts_of_other_variables",
    "start anew",
    "model.load_weights(",
)
def checkpoint_of_fewer_variables(folder, monkeypatch):
    frozen = scaled()
    frozen.layers[0].trainable = False
    frozen.compile("sgd", "mse")
    load_what_was_saved_of(frozen, folder)


class NeverScales(keras.Sequential):
    def train_step(self, data):
        variables = self.trainable_variables
        self.optimizer.apply([ops.ones(v.shape) for v in variables], variables)
        return {"loss": ops.zeros(())}

    def jax_only(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        grads = [ops.ones_like(v) for v in trainable]
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, grads, trainable
        )
        return {"loss": ops.zeros(())}, (trainable, non_trainable, optimizer, metrics)

    if BACKEND == "jax":
        train_step = jax_only


@provokes("loss_scaling.stage._warn", "never calls", "apply(")
def a_train_step_that_never_scales(folder, monkeypatch):
    with keras_mp.policy_scope("mixed_float16"):
        model = NeverScales([keras.Input((3,)), layers.Dense(2)])
    model.compile(keras_mp.LossScaleOptimizer("sgd"), "mse")
    fit(model)


class NoHalf(layers.Layer):
    """As an operation without a kernel for half precision, on every backend."""

    def call(self, x):
        if keras.backend.standardize_dtype(x.dtype) != "float32":
            raise TypeError("no kernel for dtype float16")
        return x


@provokes("policies.mixed_dtypes.tell", "mixes dtypes", "keras.Sequential(")
def a_layer_that_mixes_dtypes(folder, monkeypatch):
    with keras_mp.policy_scope("mixed_float16"):
        keras.Sequential([keras.Input((3,)), layers.Dense(4), NoHalf()])


@provokes("still_kernels._tell", "bit for bit what they were", "model.fit(")
def a_kernel_that_float16_keeps_still(folder, monkeypatch):
    monkeypatch.setattr(still_kernels, "STEPS", 1)
    with keras_mp.policy_scope("mixed_float16"):
        tiny = [layers.Rescaling(1e-7), layers.Rescaling(1e-7)]
        model = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4), *tiny, layers.Dense(2)]
        )
    model.compile("sgd", "mse")
    fit(model)


@provokes("policies.integer_casts.look", "casts float16 to int32", "cut(np.full")
def ids_in_half_precision(folder, monkeypatch):
    with keras_mp.policy_scope("mixed_float16"):
        cut = layers.Lambda(lambda table: ops.cast(table, "int32"))
        cut(np.full((2, 1), 2049, "float32"))


class MixesNothing(keras.Model):
    """A model whose `call` takes no half precision from its layer."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, x):
        y = self.dense(x)
        if keras.backend.standardize_dtype(y.dtype) != "float32":
            raise TypeError("float16 meets float32")
        return x + y


@provokes("policies.own_calls.tell", "mixes dtypes", "model(ops.ones(")
def a_model_that_mixes_dtypes(folder, monkeypatch):
    with keras_mp.policy_scope("mixed_float16"):
        model = MixesNothing()
    model(ops.ones((2, 4)))


@provokes("policies.reach.warn_of_unreached", "has no layer", "model.compile(")
def a_pattern_without_a_layer(folder, monkeypatch):
    with keras_mp.policy_scope(keras_mp.MixedFloat16(float32=["nowhere"])):
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
    model.compile("sgd", "mse")


@provokes("policies.reach.warn_of_unmatched", "has no layer", "keras_mp.convert(")
def a_converted_pattern_without_a_layer(folder, monkeypatch):
    keras_mp.convert(scaled(), keras_mp.MixedFloat16(float32=["nowhere"]))


@provokes("loss_scaling.unwrapped.look", "Optimizer 'plain' updates layers", "apply(")
def a_loop_that_scales_nothing(folder, monkeypatch):
    model, optimizer = scaled(), keras.optimizers.SGD(name="plain")
    variables = model.trainable_variables
    grads = [ops.zeros(v.shape) for v in variables]
    if BACKEND == "jax":
        optimizer.build(variables)
        state = [v.value for v in optimizer.variables]
        optimizer.stateless_apply(state, grads, [v.value for v in variables])
    else:
        optimizer.apply(grads, variables)


@provokes(
    "rounding.lost.look",
    "Optimizer 'lost' updates bfloat16 weights",
    "optimizer.apply(",
)
def adam_in_bfloat16(folder, monkeypatch):
    variable = keras.Variable([1.0], dtype="bfloat16")
    optimizer = keras.optimizers.Adam(name="lost")
    optimizer.apply([ops.ones(1, "bfloat16")], [variable])


@provokes(
    "tools.breakpoint.overflow_breakpoint.on_train_end",
    "saw no step: the model has",
    "model.fit(",
)
def a_breakpoint_that_saw_no_step(folder, monkeypatch):
    model = scaled()
    fit(model)
    # As of a model that makes its train function itself.
    model.make_train_function = lambda force=False: None
    model.train_function = model.train_function.__wrapped__
    fit(model, OverflowBreakpoint(folder / "overflow", skips=1), x=NAN)
    assert not (folder / "overflow").exists()
    assert model not in next_calls


@provokes(
    "tools.breakpoint.overflow_breakpoint._after", "could not be saved", "model.fit("
)
def a_breakpoint_that_cannot_be_saved(folder, monkeypatch):
    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(model_file, "save", full)
    fit(scaled(), OverflowBreakpoint(folder / "overflow", skips=1), x=NAN)


@provokes("callbacks.loss_scale_monitor._report", "has fallen", "model.fit(")
def a_scale_that_keeps_falling(folder, monkeypatch):
    model = scaled(keras_mp.LossScaleOptimizer("sgd", 2.0**60, max_scale=2.0**60))
    fit(model, LossScaleMonitor(), x=1e3 * X, epochs=10)


@provokes(
    "tools.comparison.comparison.compare",
    "no layer computes",
    "keras_mp.compare(",
)
def a_comparison_of_the_same(folder, monkeypatch):
    def build():
        with keras_mp.policy_scope("float32"):
            model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    two = ("float32", "mixed_float16")
    keras_mp.compare(build, (X, Y), (X, Y), two, seeds=1, verbose=0)


@provokes(
    "config.set_global_policy",
    "Did you mean 'mixed_float16'?",
    "keras_mp.set_global_policy(",
)
def pure_float16(folder, monkeypatch):
    monkeypatch.setattr(keras_mp.config, "_warned_of_float16", False)
    for name in ("float16", "float16", "mixed_float16", "bfloat16"):
        keras_mp.set_global_policy(name)


@provokes("installing._say", "goes without its repair of", "keras_mp.install(")
def operation_that_has_moved(folder, monkeypatch):
    monkeypatch.setattr(installing, "_warned", set())
    monkeypatch.setattr(installing.repairs, "wrappers", lambda: {"gone": lambda f: f})
    keras_mp.install()


@provokes("sharding.warn_of_torchs_own", "does nothing for", "model.compile(")
def torchs_own_fully_shard(folder, monkeypatch):
    monkeypatch.setattr(type(sharding.engine), "shards", True)
    monkeypatch.setattr(sharding.engine, "shards_in_vain", lambda layer: True)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "mse")


@provokes("traced.function._stay_eager", "in spite of", "_stay_eager(")
def step_that_is_not_traced(folder, monkeypatch):
    model = keras.Sequential(name="eager")
    TracedFunction(model, "train_step", eager=None)._stay_eager("it has a reason")


def warned(call, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return caught


def lines_of(function):
    lines, first = inspect.getsourcelines(function)
    return range(first, first + len(lines))


@pytest.mark.parametrize(("provoke", "said", "line"), CALLS.values(), ids=CALLS)
@pytest.mark.usefixtures("installed")
def test_it_names_the_line_of_the_user(provoke, said, line, tmp_path, monkeypatch):
    caught = warned(provoke, tmp_path, monkeypatch)
    (named,) = (w for w in caught if said in str(w.message))
    assert named.filename == __file__
    assert line in linecache.getline(__file__, named.lineno)


def calls_of_warn():
    """Where keras_mp warns, by module and function."""
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call):
                        called = ast.unparse(node.func)
                        if called.split(".")[-1] in ("warn", "warn_explicit"):
                            yield f"{name}.{function.name}", called


@pytest.mark.once("It reads the source.")
def test_every_warning_is_in_the_table_above():
    found = [*calls_of_warn()]
    inside = {(where, what) for where, what in found if "messages" in where}
    assert inside == {
        ("messages.show_message", "warn"),  # See test_full_disk.py.
        ("messages.warn", "warnings.warn_explicit"),
        ("messages.warnings_at_the_user", "warn"),
    }
    others = [call for call in found if call not in inside]
    assert {what for _, what in others} == {"warn"}, "Use keras_mp.messages."
    assert {where for where, _ in others} == {*CALLS}


def test_in_a_thread_without_a_line_of_the_user_it_is_told_all_the_same():
    def call():
        thread = threading.Thread(target=messages.warn, args=("from afar",))
        thread.start()
        thread.join()

    (warning,) = warned(call)
    assert str(warning.message) == "from afar"


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has AutoGraph")
def test_in_a_function_that_autograph_rewrote_it_is_the_line_that_called_it():
    """The file that AutoGraph writes is gone when the warning is read."""
    import tensorflow as tf

    variables = [keras.Variable(np.ones(2, "float32"))]
    optimizer = keras_mp.LossScaleOptimizer("sgd")
    optimizer.build(variables)

    @tf.function
    def step(gradient):
        optimizer.apply([gradient], variables)

    def call():
        step(tf.ones(2))

    (warning,) = warned(call)
    assert "no loss was ever scaled" in str(warning.message)
    assert warning.filename == __file__ and warning.lineno in lines_of(call)


def test_a_script_that_python_runs_as_a_module_is_a_place_like_any_other():
    class Loader:  # As that of `python -m`: asked for the source it raises.
        def get_source(self, name):
            raise ImportError("cannot handle __main__")

    script = compile("warn('in a script')", "script.py", "exec")
    names = {"__name__": "__main__", "__loader__": Loader(), "warn": messages.warn}
    (warning,) = warned(lambda: exec(script, names))
    assert (warning.filename, warning.lineno) == ("script.py", 1)


def test_a_warning_is_shown_once_a_line_as_pythons_own_are():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            messages.warn("again")
        messages.warn("again")
    assert len(caught) == 2


class Own(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


@pytest.mark.parametrize("given", [{"input_shape": (3,)}, {"input_dim": 3}])
@pytest.mark.parametrize("make", [lambda **given: layers.Dense(2, **given), Own])
@pytest.mark.usefixtures("installed")
def test_keras_warning_of_an_input_shape_names_the_line_of_the_user(make, given):
    (warning,) = warned(lambda: make(**given))
    assert str(warning.message).startswith("Do not pass an `input_shape`")
    assert warning.filename == __file__
    assert warning.lineno in lines_of(make.__init__ if make is Own else make)


def test_a_terminal_obeys_no_name(capsys):
    """A layer may be named by whoever wrote its file."""
    name = "dense\x1b[2J\x07"
    messages.show_message(f"layer {name}")
    with pytest.warns(UserWarning) as caught:
        messages.warn(f"layer {name}")
    table = Table(["layer"], [[name]], title=name, notes=[name]).text()
    for text in (capsys.readouterr().out, str(caught[0].message), table):
        assert "\x1b" not in text and "\x07" not in text
        assert r"dense\x1b[2J" in text  # Of a table, rich drops the bell.
