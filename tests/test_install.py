"""Seams, repairs and kernels: what each table says, and what can be missing."""

import contextlib
import importlib
import re

import keras
import numpy as np
import pytest
from backends import BACKEND
from keras import layers, ops

import keras_mp
import keras_mp.keras_private as private
from keras_mp import installing, seams, wanted
from keras_mp.kernels import table
from keras_mp.kernels.table import KERNELS
from keras_mp.policies import saving
from keras_mp.repairs import table as repairs
from keras_mp.repairs.table import REPAIRS, names_in, rows_of

X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
REPAIRED = names_in(REPAIRS, BACKEND)
FASTER = names_in(KERNELS, BACKEND)
OF_CORE = set(installing._CORE)
METHODS = [method for seam in seams.SEAMS for method in seam.methods]


def in_place():
    return {(owner, name): vars(owner)[name] for owner, name in installing._installed}


def is_ours(operation):
    home, name = installing.place_of(operation)
    return hasattr(vars(home)[name], "_keras_mp_original")


def there(operations):
    """Those that this Keras has: 3.10 has no bidirectional LSTM of cuDNN."""
    return filter(installing.place_of, operations)


# The tables -----------------------------------------------------------------------


def test_the_tables_name_each_wrapper():
    own = {*repairs.wrappers(), *installing._MORE_REPAIRS}
    # Keras 3.10 has no bidirectional LSTM of cuDNN.
    assert own <= REPAIRED <= own | {"lstm", "bidirectional_lstm"}
    assert set(table.wrappers()) == FASTER


def test_what_is_wrapped_stands_in_a_table():
    keras_mp.install()
    operations = names_in((*REPAIRS, *KERNELS), BACKEND)
    places = {installing.place_of(operation) for operation in operations}
    places |= {(seams.home_of(name), name.rpartition(".")[2]) for name in METHODS}
    tracebacks = (private.tracebacks, private.INCLUDE_FRAME)  # In no table.
    assert set(installing._installed) <= {*places, tracebacks}


def test_the_promises_need_few_seams():
    assert len([seam for seam in seams.SEAMS if seam.wrap]) <= 20


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.operations)
def test_a_kernel_says_what_it_gains_and_where_that_was_measured(row):
    assert row.gain


def test_a_row_is_a_phrase():
    for row in (*seams.SEAMS, *REPAIRS, *KERNELS):
        assert re.match(r"[a-z`K].*[^.]$", row.does), row


# In and out -----------------------------------------------------------------------


def test_it_is_taken_out_whole_and_put_back():
    keras_mp.install()
    ours = in_place()
    originals = {place: method._keras_mp_original for place, method in ours.items()}
    keras_mp.uninstall()
    keras_mp.uninstall()
    assert {place: vars(place[0])[place[1]] for place in ours} == originals
    keras_mp.install()
    again = in_place()
    keras_mp.install()
    assert in_place() == again
    for place, method in again.items():
        assert method._keras_mp_original is originals[place], place


def test_what_was_made_before_goes_on_and_what_comes_is_keras_own():
    keras_mp.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(2)])
    model.compile("adam", "mse")
    keras_mp.uninstall()
    assert model.layers[0].compute_dtype == "float16"
    before = model.evaluate(X, Y, verbose=0)
    model.fit(X, Y, epochs=3, verbose=0)
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    assert model.evaluate(X, Y, verbose=0) < before
    keras.config.set_dtype_policy("mixed_float16")
    # Ours would keep it in float32.
    assert layers.Softmax().compute_dtype == "float16"
    keras_mp.install()
    keras_mp.set_global_policy("mixed_float16")
    softmax = layers.Softmax()
    softmax(X)
    assert softmax.compute_dtype == "float32"


def test_without_it_a_skipped_step_of_fit_moves_statistics():
    keras_mp.set_global_policy("mixed_float16")
    normalization = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((4,)), normalization, layers.Dense(2)])
    model.compile(keras_mp.LossScaleOptimizer("sgd", 2.0**24), "mse")
    keras_mp.uninstall()
    before = [v.numpy() for v in (model.layers[-1].kernel, normalization.moving_mean)]
    model.fit(X, Y * 1e6, verbose=0)
    kernel, mean = model.layers[-1].kernel.numpy(), normalization.moving_mean.numpy()
    assert int(model.optimizer.skipped_steps) == 1
    assert (kernel == before[0]).all() and (mean != before[1]).all()


# Without kernels ------------------------------------------------------------------


@pytest.mark.kernels
def test_kernels_can_be_left_out():
    keras_mp.install(kernels=False)
    assert not wanted.kernels
    assert all(map(is_ours, there(REPAIRED))) and not any(
        map(is_ours, FASTER - REPAIRED)
    )
    keras_mp.MixedFloat16()  # Who asks later changes nothing.
    assert not any(map(is_ours, FASTER - REPAIRED))
    keras_mp.install()
    assert wanted.kernels and all(map(is_ours, there(FASTER | REPAIRED)))
    keras_mp.install(kernels=False)
    assert not any(map(is_ours, FASTER - REPAIRED))


def test_the_environment_leaves_them_out_for_all(monkeypatch):
    monkeypatch.setenv("KERAS_MP_KERNELS", "0")
    keras_mp.set_global_policy("mixed_float16")
    assert not wanted.kernels and not any(map(is_ours, FASTER - REPAIRED))
    keras_mp.install()
    assert not wanted.kernels


def test_another_word_there_is_refused(monkeypatch):
    monkeypatch.setenv("KERAS_MP_KERNELS", "no")
    with pytest.raises(ValueError, match="`KERAS_MP_KERNELS` must be 0 or 1. Received"):
        keras_mp.set_global_policy("mixed_float16")
    assert not installing._installed
    assert keras_mp.global_policy().name == "float32"


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"])
def test_a_training_without_them_is_one_with_them(policy):
    losses = []
    for kernels in (True, False):
        keras_mp.uninstall()
        keras_mp.install(kernels)
        keras_mp.set_global_policy(policy)
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(8, 3, activation="relu"),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dense(512, activation="gelu"),
                layers.Dense(600, activation="softmax"),  # A large head.
            ]
        )
        model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
        generator = np.random.default_rng(0)
        x = generator.normal(size=(32, 8, 8, 3)).astype("float32")
        history = model.fit(x, np.arange(32), epochs=3, verbose=0, shuffle=False)
        losses.append(history.history["loss"])
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(*losses, rtol=0.05)


# Names that have moved ------------------------------------------------------------


@pytest.fixture(autouse=True)
def warns_anew():
    installing._warned.clear()


def nothing_is_in():
    return not (installing._installed or wanted.done)


@pytest.mark.parametrize("method", METHODS)
def test_a_seam_that_cannot_be_set_is_an_error_where_half_precision_is_asked_for(
    method, monkeypatch
):
    monkeypatch.delattr(seams.home_of(method), method.rpartition(".")[2])
    with contextlib.suppress(ImportError):
        seams.home_of(method)
        pytest.skip("Another class defines it as well.")
    with pytest.raises(ImportError, match=f"keras_mp needs {re.escape(method)}, which"):
        keras_mp.set_global_policy("mixed_float16")
    assert nothing_is_in()
    monkeypatch.undo()
    assert keras_mp.global_policy().name == "float32"


NEEDED = [
    "AutocastScope",
    "Functional",
    "current_path",
    "get_keras_mask",
    "get_stateless_scope",
    "policy_module",
    "set_keras_mask",
    "untracked",
]


@pytest.mark.parametrize("name", NEEDED)
def test_so_is_a_private_name_that_all_stands_on(name, monkeypatch):
    monkeypatch.setattr(private, name, private.Missing("keras.src.gone"))
    with pytest.raises(ImportError, match="keras_mp needs keras.src.gone, which Keras"):
        keras_mp.LossScaleOptimizer("adam")
    assert nothing_is_in()


@pytest.mark.parametrize("name", ["CONVERT_INPUTS", "DTYPE_POLICY"])
def test_so_is_a_name_that_would_be_wrong_in_silence(name, monkeypatch):
    monkeypatch.setattr(private, name, "_gone")
    with pytest.raises(ImportError, match="keras_mp needs Layer: _gone, which Keras"):
        keras_mp.MixedFloat16()
    assert nothing_is_in()


def test_so_is_the_context_of_a_call(monkeypatch):
    used = private._names_used_by
    monkeypatch.setattr(
        private, "_names_used_by", lambda owner: used(owner) - {"current_call_ctx"}
    )
    with pytest.raises(ImportError, match="needs Layer: current_call_ctx, which"):
        keras_mp.MixedFloat16()
    assert nothing_is_in()


# Keras without an LSTM of cuDNN needs no repair of it.
@pytest.mark.parametrize(
    "operation", sorted((REPAIRED | FASTER) - {"lstm", "bidirectional_lstm", *OF_CORE})
)
@pytest.mark.kernels
def test_an_operation_that_has_moved_is_left_out_with_a_warning(operation, monkeypatch):
    while (place := private.place_of(operation)) is not None:
        monkeypatch.delattr(*place)
    kind = "repair" if operation in REPAIRED else "kernel"
    message = f"goes without its {kind} of `{re.escape(operation)}`: keras .* does not"
    with pytest.warns(UserWarning, match=message):
        keras_mp.install()
    assert all(map(is_ours, there((REPAIRED | FASTER) - {operation})))
    keras_mp.uninstall()
    keras_mp.install()  # It is said once.


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (operation, name)
        for operation in sorted(FASTER)
        for row in rows_of(operation, KERNELS)
        for name in row.needs
    ],
)
@pytest.mark.kernels
def test_a_kernel_goes_without_a_private_name_of_a_framework(
    operation, name, monkeypatch
):
    module, _, attribute = name.partition(":")
    monkeypatch.delattr(importlib.import_module(module), attribute)
    with pytest.warns(UserWarning, match=f"its kernel of .*{re.escape(attribute)}"):
        keras_mp.set_global_policy("mixed_float16")
    assert is_ours(operation) == (operation in REPAIRED)
    q = ops.ones((1, 8, 1, 16), "float16")
    assert np.isfinite(ops.convert_to_numpy(ops.dot_product_attention(q, q, q))).all()
    train_a_large_head()


def train_a_large_head():
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(512), layers.Dense(600, activation="softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    losses = model.fit(X, np.arange(8), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


OF_TORCH = (
    "_foreach_copy_",
    "_amp_foreach_non_finite_check_and_unscale_",
)


@pytest.mark.parametrize("name", OF_TORCH if BACKEND == "torch" else ())
def test_a_step_goes_without_a_kernel_of_torch(name, monkeypatch, mixed_float16):
    import torch

    train_a_large_head()
    monkeypatch.delattr(torch, name)
    train_a_large_head()


@pytest.mark.parametrize("moment", ["_put", "wrap_own_get_configs"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_the_middle_leaves_nothing_in(moment, error, monkeypatch):
    place = saving if moment == "wrap_own_get_configs" else installing
    put, calls = getattr(place, moment), []

    def fails(*args):
        put(*args)
        calls.append(args)
        if moment != "_put" or len(calls) == 7:
            raise error

    monkeypatch.setattr(place, moment, fails)
    with pytest.raises(error):
        keras_mp.set_global_policy("mixed_float16")
    assert nothing_is_in() and not hasattr(layers.Layer.__call__, "_keras_mp_original")
    monkeypatch.undo()
    assert keras_mp.global_policy().name == "float32"
    keras_mp.install()
    assert wanted.done
