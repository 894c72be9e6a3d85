"""`compare`: nothing differs but the policy, and what differs then is reported."""

import dataclasses
import json
import math
import re
import warnings

import keras
import matplotlib
import numpy as np
import pytest
from backends import BACKEND, Batches, batches_of, same_bits, values
from keras import layers, ops
from workplace import block, real, write

import keras_mp
import keras_mp.keras_private as private
from keras_mp.backends import engine
from keras_mp.tools.comparison import judgement
from keras_mp.tools.comparison.comparison_report import Comparison
from keras_mp.tools.comparison.stopwatch import Stopwatch
from keras_mp.tools.comparison.training import Training

rng = np.random.default_rng(0)
X = rng.normal(size=(48, 8)).astype("float32")
Y = X @ rng.normal(size=(8, 2)).astype("float32")
TRAIN, VALIDATION = (X[:32], Y[:32]), (X[32:], Y[32:])
BATCHES = batches_of(*TRAIN, size=8)
THREE = ("float32", "mixed_float16", "mixed_bfloat16")


def model_of(*parts, optimizer="sgd", eager=True):
    """Eager, as most of these tests compile nothing."""
    model = keras.Sequential([keras.Input((8,)), *parts, layers.Dense(2, name="head")])
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=eager)
    return model


def build():
    return model_of(layers.Dense(4, name="hidden"))


def compare(build=build, train=TRAIN, validation=VALIDATION, *args, **kwargs):
    kwargs = {"batch_size": 8, "verbose": 0, **kwargs}
    return keras_mp.compare(build, train, validation, *args, **kwargs)


# Nothing differs but the policy ---------------------------------------------------


@pytest.mark.trains_many
def test_the_same_policy_twice_gives_the_same_numbers():
    def build():
        return model_of(
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            optimizer="adam",
            eager=False,
        )

    found = compare(build, policies=("float32", "float32"), seeds=2, epochs=2)
    assert found.policies == ("float32", "float32 #2")
    first, again, other, _ = found.trainings
    assert (first.seed, again.seed, other.seed) == (0, 0, 1)
    assert first.losses == again.losses and len(first.losses) == 2
    assert first.metrics == again.metrics and set(first.metrics) == {"loss", "mae"}
    assert first.losses != other.losses
    assert found.difference("float32 #2", "loss").verdict == judgement.SAME
    assert first.seconds_per_step > 0
    if BACKEND == "jax":
        # Weights and Adam's moments, all of them in and out of the step in place.
        assert first.peak_memory > 4 * 3 * (8 * 8 + 8 * 2)
        assert first.peak_memory == again.peak_memory
    else:
        assert first.peak_memory is None


class Noted(layers.Layer):
    """Notes what it is called with in training."""

    def __init__(self, notes):
        super().__init__(dtype="float32")
        self._note = notes.append

    def call(self, x, training=False):
        if training:
            self._note(np.array(ops.convert_to_numpy(x)))
        return x


@pytest.mark.trains_many
def test_each_policy_starts_from_the_same_weights_and_sees_the_same_batches():
    models, batches, under = [], [], []

    def drawn():
        return sum(np.random.rand() for _ in models)

    def build():
        under.append(keras.config.dtype_policy().name)
        batches.append([])
        # It skips no step, which `fit` would take again, with the same batch.
        still = keras.optimizers.SGD(0.0, loss_scale_factor=1.0)
        # Not the same at each call, nor is what it leaves of the random state.
        dense = layers.Dense(4, bias_initializer=lambda *_, **__: ops.ones(4) * drawn())
        models.append(model_of(Noted(batches[-1]), dense, optimizer=still))
        return models[-1]

    found = compare(build, policies=THREE, seeds=(5, 7))
    # Of each seed, the first gave the initial values and was never trained. The
    # policies take turns in going first.
    assert under == [THREE[i] for i in (0, 0, 1, 2, 0, 1, 2, 0)]
    assert [(t.seed, t.policy) for t in found.trainings] == [
        (seed, policy) for seed in (5, 7) for policy in THREE
    ]
    first, second = models[:4], models[4:]
    assert len(second) == 4
    for seed in (first, second):
        weights = [values(m.trainable_variables) for m in seed]
        assert all(same_bits(weights[0], other) for other in weights)
    seen = [batch for batch in batches if batch]
    assert len(seen) == 6 and len(seen[0]) == 4
    assert all(same_bits(seen[0], training) for training in seen[1:3])
    assert all(same_bits(seen[3], training) for training in seen[4:])
    assert not same_bits(seen[0], seen[3])
    initial = [values(m.trainable_variables) for m in (first[0], second[0])]
    assert not same_bits(*initial)


@pytest.mark.trains_many
def test_layers_have_the_same_names_under_each_policy_and_the_count_goes_on():
    layers.Dense(2)
    paths = []

    def build():
        model = model_of(layers.Dense(4))
        paths.append([layer.path for layer in model.layers])
        return model

    compare(build, seeds=1)
    assert len(paths) == 4 and all(p == paths[0] for p in paths)
    before = private.names_given()["dense"]
    assert layers.Dense(2).name == f"dense_{before}"


@pytest.mark.trains_many
def test_a_model_without_an_input_starts_from_the_same_weights():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)
            self.drop = layers.Dropout(0.5)

        def call(self, x, training=False):
            return self.dense(self.drop(x["a"], training=training))

    made = []

    def build():
        made.append(Own())
        made[-1].compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
        return made[-1]

    data = ({"a": X}, Y, np.ones(48, "float32"))
    found = compare(build, data, data, seeds=1)
    weights = [values(m.trainable_variables) for m in made]
    assert len(weights[0]) == 2
    assert all(same_bits(weights[0], other) for other in weights)
    assert all(math.isfinite(t.metrics["loss"]) for t in found.trainings)


@pytest.mark.trains_many
def test_each_training_has_callbacks_of_its_own():
    made = []

    class Steps(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            made.append(self)
            self.count = 0

        def on_train_batch_end(self, batch, logs=None):
            self.count += 1

    found = compare(policies=THREE, seeds=1, callbacks=lambda: [Steps()])
    assert [steps.count for steps in made] == [4, 4, 4]
    for steps, training in zip(made, found.trainings, strict=True):
        dtypes = {layer.compute_dtype for layer in steps.model.layers}
        assert dtypes == set(training.compute_dtypes)


# Data of every kind ---------------------------------------------------------------


class Reordered(Batches):
    """Is in another order after each epoch, whatever the seed."""

    def __init__(self):
        super().__init__(*BATCHES)
        self.first = 0

    def on_epoch_end(self):
        self.first += 1

    def __getitem__(self, i):
        return super().__getitem__((i + self.first) % 4)


def generated():
    yield from BATCHES


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras of its length
@pytest.mark.parametrize(
    ("data", "epochs"), [(Batches(*BATCHES), 2), (Reordered, 2), (generated, 1)]
)
def test_a_dataset_or_a_function_that_makes_one_is_the_same_for_each(data, epochs):
    found = compare(train=data, policies=("float32",) * 2, seeds=1, epochs=epochs)
    one, other = found.trainings
    assert one.losses == other.losses
    assert not any("order" in note for note in found.notes)


def test_a_dataset_that_changes_its_order_is_reported():
    with pytest.warns(UserWarning, match="order of its own"):
        found = compare(train=Reordered(), policies=THREE[:2], seeds=1)
    assert any("`train` give a function" in sentence for sentence in found.sentences)


# What is reported -----------------------------------------------------------------


class Spoiled(layers.Layer):
    """Does something else when it is asked in a half dtype, and not to learn."""

    def __init__(self, spoil, **kwargs):
        super().__init__(**kwargs)
        self.spoil = spoil

    def call(self, x, training=False):
        return self.spoil(x, self.compute_dtype, training)


def spoiled(spoil, optimizer=lambda: "sgd"):
    def build():
        hidden = layers.Dense(4, name="hidden")
        return model_of(hidden, Spoiled(spoil), optimizer=optimizer())

    return build


@pytest.mark.trains_many
def test_a_planted_degradation_is_found():
    def spoil(x, dtype, training):
        return x if training or dtype != "float16" else x + 10

    found = compare(spoiled(spoil), policies=THREE, seeds=5)
    worse = found.difference("mixed_float16", "mae")
    assert worse.verdict == judgement.DIFFERS and worse.interval[0] > 1
    same = found.difference("mixed_bfloat16", "mae")
    assert same.verdict == judgement.UNCLEAR and abs(same.mean) < 0.01
    first, second = found.sentences[:2]
    assert re.match(r"mixed_float16: mae differs: .* higher \(95%: \+", first)
    assert second.startswith("mixed_bfloat16: no clear difference in loss (95%: -")


@pytest.mark.trains_many
def test_a_training_that_diverges_is_a_result():
    def spoil(x, dtype, training):
        if dtype == "float16":
            return x * 1e3 * 1e3 * 1e3
        return x / (x - x) if dtype == "bfloat16" else x

    def scaled():
        return keras_mp.LossScaleOptimizer("sgd", max_consecutive_skips=2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of the steps that no scale can mend.
        found = compare(spoiled(spoil, scaled), policies=THREE, seeds=1)
    base, half, brain = found.trainings
    assert not base.diverged
    assert half.diverged == "2 steps in a row had gradients that are not finite"
    assert half.metrics == {} and half.skipped_steps == 2
    assert brain.diverged
    text = str(found)
    assert "- mixed_float16 diverged with 1 of 1 seed: 2 steps in a row" in text
    assert re.search("diverged +float32 +0 of 1 seed", text)
    json.dumps(found.to_dict(), allow_nan=False)
    found.plot()


@pytest.mark.trains_many
def test_a_training_whose_every_step_was_skipped_has_no_time_and_no_result():
    # The loss is finite, and the gradient is not: that of a root is infinite at 0.
    def spoil(x, dtype, training):
        return x + ops.sqrt(x * 0.0) if dtype == "float16" else x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of the steps that no scale can mend.
        policies = "float32", "mixed_float16"
    found = compare(spoiled(spoil), policies=policies, seeds=1, epochs=2)
    base, half = found.trainings
    assert base.seconds_per_step and not base.diverged
    assert half.skipped_steps > 0 and half.seconds_per_step is None
    assert half.diverged == "every step was skipped"
    assert found.speed("mixed_float16") is None
    assert math.isnan(found.values("mixed_float16", "mae")[0])
    assert "mixed_float16 diverged with 1 of 1 seed: every step was skipped" in str(
        found
    )


@pytest.mark.trains_many
def test_a_loss_that_ends_as_nan_has_diverged():
    def spoil(x, dtype, training):
        return x / (x - x) if dtype == "bfloat16" else x

    found = compare(spoiled(spoil), policies=("float32", "mixed_bfloat16"), seeds=1)
    assert found.trainings[1].diverged == "the loss is nan"
    assert math.isnan(found.values("mixed_bfloat16", "mae")[0])
    assert found.difference("mixed_bfloat16", "mae").verdict == judgement.NOTHING
    json.dumps(found.to_dict(), allow_nan=False)


def test_skipped_steps_are_counted():
    def scaled():
        return keras_mp.LossScaleOptimizer("sgd", 2.0**24, retake_steps=0)

    large = (X[:32], 1e3 * Y[:32])
    untouched = spoiled(lambda x, dtype, training: x, scaled)
    found = compare(untouched, large, policies=THREE[:2], seeds=1)
    _, half = found.trainings
    assert half.skipped_steps > 0
    assert f"mixed_float16 skipped {half.skipped_steps} steps." in found.sentences


@pytest.mark.trains_many
@pytest.mark.parametrize("whole", [True, False])
def test_a_build_that_ignores_the_policy_is_reported(whole):
    def build():
        if whole:
            with keras_mp.policy_scope("float32"):
                return model_of(layers.Dense(4))
        return model_of(layers.Dense(4, dtype="float32"))

    with pytest.warns(UserWarning, match="no layer computes in another dtype"):
        found = compare(build, policies=THREE[:2], seeds=1)
    assert any("`keras_mp.inspect(build())` says" in said for said in found.sentences)


@pytest.mark.trains_many
def test_policies_of_one_name_are_distinguished():
    def build():
        return model_of(layers.Dense(4, name="other"), layers.Dense(4, name="hidden"))

    kept = keras_mp.MixedFloat16(float32=[".*/hidden"])
    found = compare(build, policies=("float32", "mixed_float16", kept), seeds=1)
    assert found.policies == ("float32", "mixed_float16", "mixed_float16 #2")
    assert [t.compute_dtypes for t in found.trainings] == [
        ("float32", "float32", "float32"),
        ("float16", "float16", "float32"),
        ("float16", "float32", "float32"),
    ]
    assert "mixed_float16 #2 is MixedFloat16(float32=['.*/hidden'])." in found.sentences


# The rule, on made-up numbers -----------------------------------------------------

of_numbers = pytest.mark.once("Numbers are judged and shown, wherever they come from.")


STUDENTS_T = {2: 12.706, 3: 4.303, 5: 2.776}  # of a table: 95 %, by the seeds


@pytest.mark.parametrize(
    ("base", "other", "mean", "deviation", "verdict"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 0.0, 0.0, judgement.SAME),
        ([1.0, 2.0, 3.0], [1.2, 2.3, 3.4], 0.3, 0.1, judgement.DIFFERS),
        ([1.0, 2.0, 3.0], [0.8, 1.7, 2.6], -0.3, 0.1, judgement.DIFFERS),
        ([1.0, 2.0, 3.0], [1.1, 2.2, 3.3], 0.2, 0.1, judgement.UNCLEAR),
        ([2.0] * 5, [2.1, 2.3, 2.2, 2.2, 2.2], 0.2, 0.0707107, judgement.DIFFERS),
        ([1.0], [1.5], 0.5, None, judgement.ONE_SEED),
        ([1.0], [1.0], 0.0, None, judgement.SAME),
        ([1.0, 2.0, math.nan], [2.0, 3.1, 9.0], 1.05, 0.0707107, judgement.DIFFERS),
        ([1.0, 2.0], [math.inf, 2.5], 0.5, None, judgement.ONE_SEED),
        ([1.0, None], [None, 2.0], math.nan, None, judgement.NOTHING),
    ],
)
@of_numbers
def test_a_difference_is_judged_by_students_t(base, other, mean, deviation, verdict):
    found = judgement.difference(base, other)
    assert found.mean == pytest.approx(mean, nan_ok=True)
    count, half = len(found.of_seeds), None
    if deviation is not None:
        half = pytest.approx(STUDENTS_T[count] * deviation / count**0.5, rel=1e-3)
    assert found.half_width == half
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("seeds", "share_of_steps"), [(2, 1 / 8), (3, 1 / 20), (5, None), (10, None)]
)
@of_numbers
def test_chance_alone_differs_once_in_twenty_and_a_true_difference_is_found(
    seeds, share_of_steps
):
    drawn = np.random.default_rng(seeds).normal(size=(2000, seeds))

    def found(by, drawn):
        differences = (judgement.difference([by] * seeds, x) for x in drawn.tolist())
        return np.mean([d.verdict == judgement.DIFFERS for d in differences])

    assert found(0.0, drawn) == pytest.approx(1 - judgement.CONFIDENCE, abs=0.015)
    assert found(60.0, drawn) > 0.99
    if share_of_steps:  # In coarse steps: as the docstring says.
        assert found(0.0, np.round(drawn)) <= share_of_steps + 0.015


@of_numbers
def test_without_scipy_the_seeds_are_shown_without_a_verdict(monkeypatch):
    block(monkeypatch, "scipy")
    found = made(WORSE)
    difference = found.difference("mixed_float16", "loss")
    assert difference.verdict == judgement.NO_SCIPY and difference.half_width is None
    assert found.sentences[:2] == [
        "mixed_float16: loss changes by +0.4, +0.5, +0.6 with the seeds; "
        "accuracy changes by 0, -0.01, 0 with the seeds.",
        "No verdict. A verdict needs scipy: pip install scipy",
    ]
    assert "+0.5, no verdict: no scipy" in str(found)
    one = made({"loss": {"float32": [1.0], "mixed_float16": [1.5]}})
    assert "scipy" not in str(one)


@of_numbers
def test_ratios_are_taken_seed_by_seed():
    assert judgement.ratio([1.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == (1.0, 0.5, 2.0)
    both = judgement.ratio([1.0, 2.0], [2.0, 2.0])
    assert both.text("times as much") == "1.50 times as much (1.00 to 2.00)"
    assert judgement.ratio([2.0], [1.0]).text("times") == "0.50 times"
    assert judgement.ratio([1.0, None], [None, 2.0]) is None


# What it says ---------------------------------------------------------------------


def made(metrics, **changes):
    """A comparison of trainings that nobody has run: metric -> policy -> values."""
    policies = tuple(next(iter(metrics.values())))
    count = len(next(iter(metrics[next(iter(metrics))].values())))
    trainings = [
        Training(
            policy=policy,
            seed=seed,
            metrics={m: values[policy][seed] for m, values in metrics.items()},
            losses=(1.0, 0.5),
            seconds_per_step=0.01 * (1 + place) * (1 + seed),
            peak_memory=None,
            skipped_steps=seed if place else None,
            diverged="",
            compute_dtypes=("float32",),
        )
        for seed in range(count)
        for place, policy in enumerate(policies)
    ]
    return Comparison(
        backend=BACKEND,
        policies=policies,
        seeds=tuple(range(count)),
        epochs=2,
        trainings=tuple(dataclasses.replace(t, **changes) for t in trainings),
    )


def measured(**facts):
    """Two policies whose trainings differ in these alone: fact -> policy -> values."""
    ((_, values),) = facts.items()
    found = made({"loss": {policy: [1.0] * len(x) for policy, x in values.items()}})
    trainings = [
        dataclasses.replace(t, **{f: x[t.policy][t.seed] for f, x in facts.items()})
        for t in found.trainings
    ]
    return dataclasses.replace(found, trainings=tuple(trainings))


WORSE = {
    "loss": {"float32": [1.0, 1.1, 1.2], "mixed_float16": [1.4, 1.6, 1.8]},
    "accuracy": {"float32": [0.8, 0.82, 0.84], "mixed_float16": [0.8, 0.81, 0.84]},
}


@of_numbers
def test_sentences_come_before_the_table():
    text = str(made(WORSE))
    sentence = text.index(
        "- mixed_float16: loss differs: 0.5 higher (95%: +0.25 to +0.75); no clear\n"
        "  difference in accuracy (95%: -0.018 to +0.011)."
    )
    assert sentence < text.index("against float32")
    assert "Speed against float32: mixed_float16 0.50 times as fast." in text
    reason = engine.why_no_memory.split()[0]
    assert f"Peak memory was not measured: {reason}" in text
    assert re.search(r"loss +float32 +1\.1 ± 0\.1\n", text)
    assert re.search(r"mixed_float16 +1\.6 ± 0\.2 +\+0\.5, differs", text)
    assert re.search(r"step time +float32 +20 ± 10 ms", text)
    assert re.search(r"peak memory +float32 +not measured", text)
    assert re.search(r"skipped steps +float32 +no loss scale", text)
    assert re.search(r"mixed_float16 +0 to 2\n?$", text)
    untimed = str(made(WORSE, seconds_per_step=None))
    assert "Speed was not measured: it takes more steps" in untimed


@of_numbers
def test_a_ratio_is_that_of_the_means_beside_it_with_one_seed_too():
    seconds = {"float32": [0.004, 0.002], "mixed_float16": [0.003, 0.0018]}
    found = measured(seconds_per_step=seconds)
    text = str(found)
    assert re.search(r"step time +float32 +3 ± 1.4 ms\n", text)
    faster = "1.25 times as fast (1.11 to 1.33)"
    assert f"mixed_float16 {faster}." in found.sentences[1]
    assert re.search(rf"mixed_float16 +2.4 ± 0.85 ms +{re.escape(faster)}\n", text)
    sizes = {"float32": [1_240_000], "mixed_float16": [1_380_000]}
    text = str(measured(peak_memory=sizes))
    assert re.search(r"peak memory +float32 +1.240 MB\n", text)
    assert re.search(r"mixed_float16 +1.380 MB +1.11 times as much\n", text)


@of_numbers
def test_there_is_no_verdict_if_times_of_seeds_disagree_or_there_is_one_seed():
    seconds = {"float32": [0.001, 0.004], "mixed_float16": [0.0032, 0.0015]}
    found = measured(seconds_per_step=seconds)
    assert "mixed_float16 unclear: 0.31 to 2.67 times as fast." in found.sentences[1]
    assert str(found).count("unclear") == 2 and "1.06 times" not in str(found)
    text = str(measured(seconds_per_step={p: x[:1] for p, x in seconds.items()}))
    assert "0.31 times" not in text and "no verdict: one seed" in text
    assert "- Speed is not compared: one seed gives no verdict." in text
    found = made({"loss": {"float32": [1.0], "mixed_float16": [1.5]}})
    assert found.sentences[0] == (
        "mixed_float16: loss is 0.5 higher, and one seed gives no verdict."
    )
    assert "no verdict: one seed" in str(found)


@of_numbers
def test_the_sentence_and_the_table_count_skipped_steps_alike():
    skips = {"float32": [None, None], "mixed_float16": [80, 80]}
    text = str(measured(skipped_steps=skips))
    assert "mixed_float16 skipped 80 steps with each of 2 seeds." in text
    assert re.search(r"mixed_float16 +80\n?$", text) and "160" not in text


@of_numbers
def test_it_is_json():
    found = json.loads(json.dumps(made(WORSE).to_dict(), allow_nan=False))
    assert found["metrics"]["loss"]["mixed_float16"] == {
        "mean": pytest.approx(1.6),
        "spread": pytest.approx(0.2),
        "difference": pytest.approx(0.5),
        "half_width": pytest.approx(0.248, abs=0.001),
        "verdict": "differs",
    }
    assert found["speed"]["mixed_float16"]["median"] == pytest.approx(0.5)
    assert found["peak_memory"]["mixed_float16"] is None
    assert len(found["trainings"]) == 6
    broken = made({"loss": {"a": [math.nan], "b": [math.inf]}}, losses=(math.nan,))
    assert json.loads(json.dumps(broken.to_dict(), allow_nan=False))


@of_numbers
def test_the_html_is_one_file_that_loads_nothing(tmp_path):
    made(WORSE).to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "loss differs" in text and "<svg" in text
    assert not re.search(r"""(src|href)=["'](?!#)""", text)
    assert "http" not in re.sub(
        r'xmlns[:\w]*="[^"]*"|<metadata>.*?</metadata>', "", text, flags=re.S
    )


@of_numbers
def test_the_html_says_that_there_is_no_picture_without_matplotlib(monkeypatch):
    block(monkeypatch, "matplotlib")
    sentence = "Drawing needs matplotlib: pip install matplotlib"
    assert f"<p>No picture. {sentence}</p>" in made(WORSE)._repr_html_()


@of_numbers
def test_the_plot_has_axes_units_and_a_sentence():
    figure = made(WORSE).plot()
    left, middle, right = figure.axes
    assert left.get_xlabel() == "epoch" and "loss" in left.get_title()
    assert len(left.lines) == 6
    assert "accuracy" in middle.get_ylabel() and "unit" in middle.get_ylabel()
    assert "times that of float32 (no unit)" in right.get_ylabel()
    legend = [text.get_text() for text in right.get_legend().get_texts()]
    assert "peak memory: not measured" in legend
    caption = " ".join(figure.texts[0].get_text().split())
    assert "Accuracy: one point for each training" in caption


# Time and memory ------------------------------------------------------------------


class Device:
    """Stands in for `time`, and for a device that works off what it is given."""

    now = done = 0.0

    def perf_counter(self):
        return self.now

    def give(self, seconds, waits):
        self.done = max(self.now, self.done) + seconds
        if waits:
            self.now = self.done

    def convert_to_numpy(self, variable):
        assert variable == "a metric"
        self.now = max(self.now, self.done)


class Fake:
    """All that a stopwatch asks of a model."""

    metrics_variables, variables = ("a metric",), ()

    def __init__(self, steps_per_execution):
        self.steps_per_execution = steps_per_execution


def timed(monkeypatch, epochs, known=True, at_once=1, waits=True):
    """What a stopwatch says of calls that take so many seconds, epoch by epoch."""
    device = Device()
    monkeypatch.setattr("keras_mp.tools.comparison.stopwatch.time", device)
    monkeypatch.setattr("keras_mp.tools.comparison.stopwatch.ops", device)
    watch = Stopwatch()
    watch.set_model(Fake(at_once))
    steps = len(epochs[0]) * at_once - (at_once - 1)  # The last call has one step.
    watch.set_params({"epochs": len(epochs), "steps": steps if known else None})
    for epoch, calls in enumerate(epochs):
        watch.on_epoch_begin(epoch)
        for number, seconds in enumerate(calls):
            watch.on_train_batch_begin(number * at_once)
            device.give(seconds, waits)
            watch.on_train_batch_end(number * at_once + at_once - 1)
        watch.on_epoch_end(epoch)
        device.now += 1000.0
    return watch.seconds_per_step


@pytest.mark.parametrize(
    ("epochs", "options", "seconds"),
    [
        # One epoch is timed without its first and its last call,
        ([[100, 1, 2, 3, 100]], {}, 2),
        ([[100, 1, 2, 3, 100]], {"waits": False}, 2),
        ([[100, 2, 4, 6, 100]], {"at_once": 2}, 2),
        # several are without the first,
        ([[100, 1, 100], [1, 2, 3], [4, 5, 6]], {}, 3.5),
        ([[100, 1, 1], [1, 2, 3]], {"waits": False}, 2),
        ([[100, 1, 100], [1, 2, 3]], {"known": False}, 2),
        ([[100, 1, 100], [2, 2, 1]], {"at_once": 2}, 1),
        # and too few steps are no number.
        ([[1]], {}, None),
        ([[1, 1, 1, 1]], {}, None),
        ([[1] * 9], {"known": False}, None),
        ([[1], [1]], {}, None),
    ],
)
def test_the_time_of_a_step_is_that_of_the_device(
    monkeypatch, epochs, options, seconds
):
    assert timed(monkeypatch, epochs, **options) == seconds


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's counters")
def test_tensorflow_counts_what_a_training_adds_on_all_gpus(monkeypatch):
    import tensorflow as tf

    state = {"GPU:0": {"current": 10, "peak": 90}, "GPU:1": {"current": 5, "peak": 7}}
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [1, 2])
    experimental = tf.config.experimental
    monkeypatch.setattr(experimental, "get_memory_info", lambda name: dict(state[name]))
    monkeypatch.setattr(
        experimental, "reset_memory_stats", lambda name: state[name].update(peak=0)
    )
    read = engine.measure_memory()
    state["GPU:0"]["peak"], state["GPU:1"]["peak"] = 40, 8
    assert read() == (40 - 10) + (8 - 5)


@pytest.mark.skipif(BACKEND != "torch", reason="torch's counters")
def test_torch_counts_what_a_training_adds_on_all_gpus(monkeypatch):
    from torch import cuda

    now, peak = [10, 5], [90, 7]
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "memory_allocated", now.__getitem__)
    monkeypatch.setattr(cuda, "max_memory_allocated", peak.__getitem__)
    monkeypatch.setattr(
        cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(device, 0)
    )
    read = engine.measure_memory()
    peak[:] = [40, 8]
    assert read() == (40 - 10) + (8 - 5)


# What is refused, and what is left behind -------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"build": 3}, "`build` must be a function. Received: build=3"),
        ({"build": keras.Sequential()}, "Give one that returns a new compiled"),
        ({"policies": "float32"}, "`policies` must be two or more of"),
        ({"policies": ["float32"]}, "`policies` must be two or more of"),
        ({"policies": ["float32", "int8"]}, "`policies` must be two or more of"),
        ({"policies": None}, "Received: policies=.None,."),
        ({"seeds": 0}, "`seeds` must be a whole number of at least 1"),
        ({"seeds": True}, "Received: seeds=True"),
        ({"seeds": "12"}, "Received: seeds='12'"),
        ({"seeds": (1, 1)}, "different whole numbers"),
        ({"seeds": (1, -1)}, "from 0 to"),
        ({"epochs": 0}, "`epochs` must be a whole number of at least 1"),
        ({"batch_size": 1.5}, "`batch_size` must be a whole number"),
        ({"callbacks": []}, "`callbacks` must be a function that returns new"),
        ({"train": None}, "`train` must be .x, y., .* Received: train=None"),
        ({"validation": "data.csv"}, "`validation` must be .x, y., "),
        ({"train": iter([TRAIN])}, "`train` must serve each training"),
        ({"validation": generated()}, "`validation` must serve each"),
        ({"train": (X, Y, X, Y)}, "`train` must be .x, y.* a tuple of 4"),
        ({"validation": (X[:0], Y[:0])}, "`validation` must hold at least one example"),
        ({"verbose": "loud"}, "`verbose` must be 0 or 1. Received: verbose='loud'"),
        ({"build": lambda: 3}, "`build` must return a compiled keras.Model"),
        ({"build": lambda: keras.Sequential()}, "`build` must compile the model"),
    ],
)
def test_bad_input_is_refused_by_name_and_changes_nothing(arguments, message):
    keras_mp.set_global_policy("mixed_bfloat16")
    before = keras_mp.global_policy()
    with pytest.raises((TypeError, ValueError), match=message):
        compare(**arguments)
    assert keras_mp.global_policy() is before


def test_the_same_model_twice_is_refused_and_so_are_different_shapes():
    model = build()
    with pytest.raises(ValueError, match="`build` must make a new model at each call"):
        compare(lambda: model)
    units = iter([4, 5])
    with pytest.raises(ValueError, match="Received: first one with 46 numbers in 4 "):
        compare(lambda: model_of(layers.Dense(next(units))))


@pytest.mark.parametrize("calls", [0, 1])
def test_a_build_that_fails_leaves_the_global_policy_as_it_was(calls):
    left = [None] * calls

    def failing():
        layers.Dense(2)
        if not left:
            raise RuntimeError("no memory")
        left.pop()
        return build()

    keras_mp.set_global_policy("mixed_bfloat16")
    before = keras_mp.global_policy()
    names = private.names_given()
    with pytest.raises(RuntimeError, match="no memory"):
        compare(failing, policies=("mixed_float16", "float32"))
    assert keras_mp.global_policy() is before
    assert private.names_given() == names


@pytest.mark.trains_many
def test_a_bar_goes_ahead_on_stderr_unless_it_is_silenced(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # As on a terminal.
    compare(policies=THREE[:2], seeds=1, verbose=1)
    out, err = capsys.readouterr()
    assert out == "" and "mixed_float16, seed 0" in err
    compare(policies=THREE[:2], seeds=1, verbose=0)
    assert capsys.readouterr() == ("", "")


# The command ----------------------------------------------------------------------

SCRIPT = """
    import numpy as np
    import keras

    def build():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    def data():
        x = np.ones((8, 3), "float32")
        return (x, x[:, :1]), (x, x[:, :1])

    if __name__ == "__main__":
        raise SystemExit("not to be run")
"""


@pytest.mark.trains_many
@pytest.mark.slow("The command in a process of its own; `compare` itself stays.")
def test_the_command_prints_the_table_and_writes_the_html(tmp_path):
    write(tmp_path, {"train.py": SCRIPT})
    args = ["train.py", "--backend", BACKEND, "--seeds", "1", "--batch-size", "4"]
    args += ["--policies", "float32,mixed_bfloat16", "--out", "out.html"]
    fonts = matplotlib.get_cachedir()  # Listed by now.
    done = real("compare", *args, home=tmp_path, MPLCONFIGDIR=fonts)
    assert done.returncode == 0, done.stderr
    assert f"2 policies, 1 seed, 1 epoch, on {BACKEND}" in done.stdout
    assert "mixed_bfloat16" in done.stdout
    assert "<svg" in (tmp_path / "out.html").read_text(encoding="utf-8")
