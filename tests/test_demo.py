"""The demo, run as a user runs it, and judged by what it shows."""

import contextlib
import io
import re
import struct
import types

import keras
import numpy as np
import pytest
from workplace import block

from keras_mp.tools.display.plots import plot_training
from keras_mp_cli import demo as demo_module
from keras_mp_cli.demo import POLICIES, demo

pytestmark = pytest.mark.trains_many


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two epochs under each policy, once for all tests: stdout, stderr, the picture."""
    picture = tmp_path_factory.mktemp("demo") / "digits.png"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        before = keras.config.dtype_policy()
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()),
        ):
            demo(epochs=2, out=str(picture))
        after = keras.config.dtype_policy()
    return types.SimpleNamespace(
        text=out.getvalue(), picture=picture, before=before, after=after
    )


@pytest.fixture(scope="module")
def rows(run):
    """The table: policy -> the cells to the right of it."""
    lines = (line.split() for line in run.text.splitlines())
    return {cells[0]: cells[1:] for cells in lines if len(cells) == 8}


def number(cell):
    return float(cell.replace(",", "").rstrip("%"))


def test_the_table_has_one_row_for_each_policy(rows):
    assert tuple(name for name in rows if name in POLICIES) == POLICIES


def test_the_table_fits_80_columns_and_cuts_nothing_off(run):
    assert max(len(line) for line in run.text.splitlines()) <= 80
    assert "…" not in run.text


def test_every_policy_learns_the_digits_in_two_epochs(rows):
    for policy in POLICIES:
        accuracy, loss, *_ = rows[policy]
        assert 85 < number(accuracy) <= 100
        assert 0 < number(loss) < 0.4


def test_only_float16_has_a_loss_scale(rows):
    assert rows["float32"][2:4] == rows["mixed_bfloat16"][2:4] == ["none", "none"]
    scale, skipped = map(number, rows["mixed_float16"][2:4])
    assert scale == 2.0 ** round(np.log2(scale)) and 2**8 <= scale <= 2**15
    assert 0 <= skipped <= 8


def test_mixed_precision_halves_the_activations_and_keeps_the_weights(rows):
    weights = [number(rows[policy][4]) for policy in POLICIES]
    full, half, brain = (number(rows[policy][5]) for policy in POLICIES)
    assert len(set(weights)) == 1
    assert half == brain
    # All but the softmax head's ten outputs, which stay in float32.
    assert half == (full - 40) / 2 + 40


def test_a_sentence_says_how_the_times_compare(run):
    said = " ".join(run.text.split())
    ratio = r"\d+\.\d times as fast"
    assert re.search(
        rf"against float32: mixed_float16 {ratio}, mixed_bfloat16 {ratio}; .*\.", said
    )


def test_the_picture_is_a_png_of_a_sensible_size(run):
    data = run.picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 1000 <= width <= 2000 and 400 <= height <= 1200
    assert len(data) > 10_000
    assert run.picture.name in run.text


def test_the_demo_leaves_the_global_policy_as_it_was(run):
    assert run.after is run.before


# --- the picture, alone -------------------------------------------------------------

LOSSES = {"float32": [2.0, 0.5], "mixed_float16": [2.1, 0.5], "mixed_bfloat16": [2, 1]}
SCALES = [2.0**15, 2.0**14, 2.0**14, 2.0**15]


def lines_of(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_the_picture_has_a_curve_for_each_policy_and_the_scale_and_marks_skips():
    left, right = plot_training(LOSSES, SCALES, [2]).axes
    assert (left.get_xlabel(), right.get_xlabel()) == ("epoch", "step")
    assert "nats" in left.get_ylabel() and "log2" in right.get_ylabel()
    assert "loss" in left.get_title() and "mixed_float16" in right.get_title()
    assert right.get_yscale() == "log" and right.yaxis.get_transform().base == 2
    assert list(lines_of(left)) == list(LOSSES)
    for policy, line in lines_of(left).items():
        assert list(line.get_xdata()) == [1, 2]
        assert list(line.get_ydata()) == LOSSES[policy]
    assert list(lines_of(right)["loss scale"].get_ydata()) == SCALES
    cross = lines_of(right)["skipped step"]  # At the scale that overflowed.
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([2], [2**15])


@pytest.mark.parametrize(
    "scales, skipped, words",
    [
        (SCALES, [2], ["skipped steps: 1", "first at step 4"]),
        ([8.0] * 3, [], ["no gradient overflowed", "never grows"]),
        ([], [], ["no policy used a loss scale"]),
    ],
)
def test_the_caption_says_what_happened_to_the_scale(scales, skipped, words):
    (caption,) = plot_training(LOSSES, scales, skipped).texts
    said = " ".join(caption.get_text().split())
    assert all(word in said for word in words)


def test_the_picture_leaves_pyplot_alone():
    from matplotlib import pyplot

    plot_training(LOSSES, SCALES)
    assert pyplot.get_fignums() == []


# --- what can be missing ------------------------------------------------------------


def test_without_matplotlib_the_table_is_printed_with_a_hint(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(demo_module, "train", lambda *_: [])
    monkeypatch.setattr(demo_module, "table", lambda results: "the table")
    monkeypatch.setattr(demo_module, "speed_sentence", lambda results: "")
    block(monkeypatch, "matplotlib")
    demo(epochs=1, out=str(tmp_path / "none.png"))
    out = capsys.readouterr().out
    hint = "No picture. Drawing needs matplotlib: pip install matplotlib\n"
    assert out.startswith(f"{hint}the table")
    assert not (tmp_path / "none.png").exists()
