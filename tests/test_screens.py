"""What users look at: pages in a browser, pictures, tables at 80 columns."""

import inspect
import pathlib
import re
import types

import keras
import numpy as np
import pytest
from browser import HEIGHT, NARROW, WIDE, required
from keras import layers
from matplotlib import style
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from rich.cells import cell_len
from test_comparison import WORSE, made
from workplace import block

import keras_mp
from keras_mp.backends import devices
from keras_mp.policies import hardware
from keras_mp.policies.stock_rules import RULES
from keras_mp.tables import Table
from keras_mp.tools import doctor
from keras_mp.tools.diagnosis.ranges import range_of
from keras_mp.tools.display import page, plots

X = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 8)).astype("float32")
LONG = "projection_of_the_feed_forward_block_of_a_decoder_of_many_layers"
ODD = "<img src=x onerror='window.hit = 1'> & \"quoted\" &lt;"


class Times(layers.Layer):
    """Multiplies by a square, whose root float16 holds."""

    def __init__(self, root, name):
        super().__init__(name=name)
        self.root = root

    def call(self, x):
        return x * self.root * self.root


def modelled(policy, root=1.0, name="model"):
    """Layers whose names are long, odd, and nested."""
    keras.utils.set_random_seed(0)
    with keras_mp.policy_scope(policy):
        inner = [layers.Dense(8, name=LONG), Times(root, ODD)]
        quiet = layers.Rescaling(root**-2, name="quiet", dtype="float32")
        block = keras.Sequential([keras.Input((8,)), *inner, quiet], name=f"a_{LONG}")
        model = keras.Sequential([keras.Input((8,)), block, layers.Dense(8)], name=name)
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def diagnosed(*args, **kwargs):
    """One batch through it; a root of 1000 overflows."""
    return keras_mp.diagnose(modelled(*args, **kwargs), X, Y)


REPORTS = {
    "float32": lambda: diagnosed("float32"),
    "float16": lambda: diagnosed("mixed_float16", name="<script>window.hit = 1"),
    "overflow": lambda: diagnosed("mixed_float16", 1e3),
}


@pytest.fixture(scope="module", params=REPORTS)
def shown(request, browser, tmp_path_factory):
    """A report, and the file that it has written."""
    report = REPORTS[request.param]()
    path = tmp_path_factory.mktemp(request.param) / "report.html"
    report.to_html(path)
    planted = "65504" in report.sentences[0]
    assert planted == (request.param == "overflow")
    return types.SimpleNamespace(report=report, path=path, browser=browser)


@pytest.fixture(params=[WIDE, NARROW])
def window(request, shown):
    """The browser, with the report in a window of a desk or of a telephone."""
    shown.browser.open(shown.path, request.param)
    return shown.browser


# The page of a diagnosis --------------------------------------------------------------


def test_the_verdict_is_read_first(shown, window):
    assert window.texts("li") == shown.report.sentences
    assert window.hidden("h1, h2, li") == []
    bottom, *below = window.ask(
        "scrollTo(0, 0); return ['ul', 'svg', 'table'].map("
        "x => all(x)[0].getBoundingClientRect()[x === 'ul' ? 'bottom' : 'top'])"
    )
    assert bottom < below[0] < below[1]
    assert bottom < HEIGHT  # Without scrolling.


def test_nothing_is_wider_than_the_window(window):
    assert window.ask("return innerWidth") in (WIDE, NARROW)  # And not made small.
    assert window.sideways() == []
    window.click("summary")
    assert window.sideways() == []
    assert window.hidden("th, td, p, figcaption, summary") == []


def test_a_click_opens_the_table_of_all(shown, window):
    kinds = ("output", "activation gradient", "gradient")
    counts = [sum(m.kind == k for m in shown.report.measured) for k in kinds]
    assert min(counts) > 0
    rows = [f"details:nth-of-type({n + 1}) tbody tr" for n in range(len(kinds))]
    assert [len(window.hidden(row)) for row in rows] == counts  # Closed at first.
    window.click("summary")
    expected = [f"All {k}s ({n})" for k, n in zip(kinds, counts, strict=True)]
    assert window.texts("summary") == expected
    assert [len(window.texts(row)) for row in rows] == counts
    assert [window.hidden(row) for row in rows] == [[]] * len(rows)


def test_names_are_shown_as_they_are_and_run_nothing(shown, window):
    window.click("summary")
    names = [m.path for m in shown.report.measured]
    assert sorted(window.texts("details td:first-child")) == sorted(names)
    assert any(ODD in name for name in names) and any(LONG in name for name in names)
    assert window.texts("h2")[0].startswith(f"{shown.report.model}: ")
    ran = window.ask("return [typeof hit, all('img, script').length]")
    assert ran == ["undefined", 0]


def test_the_page_loads_nothing_and_the_console_is_silent(shown):
    shown.browser.open(shown.path)
    assert shown.browser.loaded() == []
    assert shown.browser.complaints() == []


def test_without_matplotlib_the_page_says_so_and_has_the_rest(browser, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        block(patch, "matplotlib")
        diagnosed("float32").to_html(tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    sentence = "Drawing needs matplotlib: pip install matplotlib"
    assert f"No picture. {sentence}" in browser.texts("p")
    assert browser.hidden("h2, li, p, summary") == []


# Its picture --------------------------------------------------------------------------


def test_the_picture_is_within_the_window(window):
    left, right, height = window.ask(
        "const {left, right, height} = all('svg')[0].getBoundingClientRect();"
        "return [left, right, height]"
    )
    size = window.ask("return innerWidth")
    assert 0 <= left and right <= size and right - left > min(500, 0.9 * size)
    assert height > 200


def test_its_texts_can_be_read(window):
    assert window.hidden("svg text") == []
    assert window.overlaps("svg text") == []
    assert min(window.ask("return all('svg text').map(x => boxes(x)[0].height)")) > 8
    texts = window.texts("svg text")
    for words in ("share of the elements (%)", "exponent e", "loss scale", "become 0"):
        assert any(words in text for text in texts)
    (caption,) = window.texts("figcaption")
    assert caption.endswith(".") and "yellow band" in caption


def axes_of_gradients(report):
    """The number of their axes: outputs that overflow are drawn above them."""
    return 2 if "65504" in report.sentences[0] else 1


def test_its_bars_are_as_high_as_the_gradients_are_many(shown, window):
    axes = axes_of_gradients(shown.report)
    for kind, colour in (("gradient", "#0072b2"), ("activation gradient", "#e69f00")):
        tensors = [t for t in shown.report.to_dict()["tensors"] if t["kind"] == kind]
        counts = {}
        for tensor in tensors:
            for exponent, count in tensor["histogram"].items():
                counts[int(exponent)] = counts.get(int(exponent), 0) + count
        bars = f'svg #axes_{axes} path[clip-path][style*="{colour}"]'
        heights = window.ask(
            "return all(arguments[0]).map(x => x.getBoundingClientRect())"
            ".sort((a, b) => a.left - b.left).map(x => x.height).filter(x => x)",
            bars,
        )
        expected = np.array([counts[e] for e in sorted(counts)])
        assert len(heights) == len(expected) > 3
        np.testing.assert_allclose(
            np.array(heights) / max(heights), expected / max(expected), atol=0.02
        )
        assert window.overlaps(bars, f"#legend_{axes}") == []


def test_its_bands_stand_where_float16_ends(shown, window):
    shift = round(np.log2(shown.report.scale))
    axes = axes_of_gradients(shown.report)
    bands = [
        window.ask(
            "const {left, right} = all(arguments[0])[0].getBoundingClientRect();"
            "return [left, right]",
            f'svg #axes_{axes} path[clip-path][style*="{colour}"]',
        )
        for colour in ("#d55e00", "#f0e442", "#cc79a7")
    ]
    ticks = window.ask(
        "return all(arguments[0]).map("
        "x => [x.textContent, x.getBoundingClientRect()]).map("
        "([text, box]) => [text, (box.left + box.right) / 2])",
        f"svg #matplotlib\\.axis_{2 * axes - 1} text",
    )[:-1]
    ticks = [(int(text.replace("\u2212", "-")), x) for text, x in ticks]
    (e0, x0), *_, (e1, x1) = ticks

    def exponent(x):
        return e0 + (x - x0) * (e1 - e0) / (x1 - x0)

    zero, subnormal, overflow = bands
    ends = [exponent(x) for x in (zero[1], *subnormal, overflow[0])]
    expected = [-25.5 - shift, -25.5 - shift, -14.5 - shift, 15.5 - shift]
    np.testing.assert_allclose(ends, expected, atol=0.6)


# Photographs --------------------------------------------------------------------------


def colours(pixels):
    return len(np.unique(pixels @ [65536, 256, 1]))


@pytest.mark.parametrize("shown", ["overflow"], indirect=True)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_photograph_shows_a_page_and_a_picture(shown, width, dark, tmp_path):
    shown.browser.open(shown.path, width, dark)
    photograph = shown.browser.photograph(tmp_path / "report.png")
    assert photograph.shape[1] == width
    assert (photograph[-1, -1].max() < 50) if dark else (photograph[-1, -1].min() > 250)
    left, top, right, bottom = shown.browser.ask(
        "const box = all('svg')[0].getBoundingClientRect();"
        "return [box.left, box.top, box.right, box.bottom].map(Math.round)"
    )
    picture = photograph[top:bottom, left:right].reshape(-1, 3)
    assert colours(picture) > 50
    for colour in ([0, 114, 178], [230, 159, 0]):
        assert (abs(picture - colour).max(axis=1) < 3).mean() > 0.001
    assert colours(photograph[bottom:].reshape(-1, 3)) > 10  # The letters' shades.


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_stands_out_from_its_ground(shown, dark):
    shown.browser.open(shown.path, dark=dark)
    shown.browser.click("summary")
    assert shown.browser.pale() == []
    assert len(shown.browser.pale(22)) > 50  # None reaches that: all were asked.


# In a notebook ------------------------------------------------------------------------

# What a notebook has of its own, and JupyterLab's way with the tables of an output.
NOTEBOOK = """<!doctype html><meta charset="utf-8"><style>
body { background: %s; color: %s; font: 13px sans-serif; overflow-y: scroll }
.output table { font-size: 12px; border: none; table-layout: fixed }
.output tbody tr:nth-child(odd) { background: transparent }
.output td, .output th { text-align: right; white-space: normal }
</style><h2>A title</h2><p>Some <b>text</b>.</p><ul><li>an item</li></ul>
<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>1</td></tr><tr><td>2</td></tr>
</tbody></table><details><summary>more</summary>text</details>
<figure><svg width="9" height="9"><path d="M0 0L9 9"/><text>t</text></svg>
<figcaption>what</figcaption></figure><div class="output"></div>"""
THEMES = {"light": ("#fff", "rgba(0, 0, 0, .87)"), "dark": ("#111", "#fff")}
STYLES = (
    "return all('body > :not(.output), body > :not(.output) *').map("
    "x => [...getComputedStyle(x)].map(k => `${k}: ${getComputedStyle(x)[k]}`).join())"
)
CELLS = {
    "diagnosis": lambda: diagnosed("mixed_float16"),
    "inspection": lambda: keras_mp.inspect(keras.Sequential([layers.Dense(8)])),
    "rules": lambda: RULES,
}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_can_be_read_and_leaves_the_notebook_as_it_is(
    browser, cell, theme, tmp_path
):
    (tmp_path / "notebook.html").write_text(NOTEBOOK % THEMES[theme])
    # The browser's theme need not be the notebook's.
    browser.open(tmp_path / "notebook.html", dark=theme == "light")
    before = browser.ask(STYLES)
    show = "all('.output')[0].innerHTML = arguments[0]"
    browser.ask(show, CELLS[cell]()._repr_html_())
    assert len(before) > 10 and browser.ask(STYLES) == before
    browser.click(".output summary")
    assert browser.hidden(".output :is(p, li, td)") == []
    assert browser.pale(within=".output") == []


# Pictures -----------------------------------------------------------------------------

FULL = range_of(2.0 ** np.arange(-60, 20.0)).shares
LOSSES = {"float32": [2.0, 0.5], "mixed_float16": [2.1, 0.5], "mixed_bfloat16": [2, 1]}
ACCURACY = "accuracy", {"float32": [0.9, 0.95], "mixed_float16": [0.91, np.nan]}, 0.035
SPEEDS = {"speed": {"mixed_float16": (0.5, 0.4, 0.7)}}
WEIGHTS = {"by weights (0% are 0)": FULL}
DRAWN = {
    plots.plot_training: [
        (LOSSES, [2.0**15, 2.0**14, 2.0**14, 2.0**15], [2]),
        ({"float32": [1.0]}, []),
        ({"float32": [2.0, 0.5], "mixed_float16": [2.1, np.nan]}, [2.0**15] * 1200),
    ],
    plots.plot_comparison: [
        (
            {"float32": [[2.0, 1.0], [2.1, 1.1]], "mixed_float16": [[2.0, np.nan]] * 2},
            *ACCURACY,
            SPEEDS | {"peak memory": {"mixed_float16": None}},
        ),
        (
            {"float32": [[2.0], [2.2]], "mixed_float16": [[2.1], [np.inf]]},
            *ACCURACY,
            SPEEDS,
        ),
    ],
    plots.plot_gradients: [
        (
            WEIGHTS | {"by activations (0% are 0, 100% are not finite)": {}},
            2.0**15,
        ),
        ({"by activations (0% are 0)": range_of(X).shares}, 1.0),
        ({}, 2.0**24),
        (WEIGHTS, 2.0**15, {"output of model/square": FULL}),
        ({}, 1.0, {"output of model/a": FULL, "output of model/b": {13: 1.0}}),
    ],
}
COUNTS = ("epoch", "step", "policy")  # Which need no unit.
drawn = pytest.mark.parametrize(
    ("plot", "arguments"),
    [(plot, case) for plot, cases in DRAWN.items() for case in cases],
)


def test_every_plot_is_among_those_that_are_drawn_here():
    def draws(function):
        return inspect.signature(function).return_annotation is Figure

    functions = inspect.getmembers(plots, inspect.isfunction)
    found = {x for name, x in functions if not name.startswith("_") and draws(x)}
    assert found == set(DRAWN)


@drawn
@pytest.mark.once("A picture is drawn from numbers.")
def test_a_plot_has_a_title_axes_with_units_and_a_sentence(plot, arguments):
    figure = plot(*arguments)
    assert figure.axes
    for axes in figure.axes:
        assert axes.get_title()
        for label in (axes.get_xlabel(), axes.get_ylabel()):
            assert label in COUNTS or re.fullmatch(r"\w.* \(.+\)", label)
    (caption,) = figure.texts
    assert re.fullmatch(r"[A-Z].*\.", caption.get_text(), re.DOTALL)
    # A notebook shows the plot that a cell ends with.
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_one_epoch_is_bars_from_0_and_a_cross_is_where_a_training_diverged():
    plot = plots.plot_comparison
    lines, bars = (plot(*case) for case in DRAWN[plot])
    heights = [bar.get_height() for bar in bars.axes[0].patches]
    assert heights == [pytest.approx(2.1), 2.1] and bars.axes[0].get_ylim()[0] == 0
    assert [text.get_text() for text in bars.axes[0].texts] == ["1 not finite"]
    crosses = [line for line in lines.axes[0].get_lines() if line.get_marker() == "X"]
    assert [line.get_xydata().tolist() for line in crosses[:2]] == [[[2.0, 2.0]]] * 2
    assert not lines.axes[0].patches


def test_a_picture_of_a_report_follows_the_page_and_the_window(browser, tmp_path):
    case = DRAWN[plots.plot_comparison][0]
    shown = page.cell("A title", ["A sentence."], lambda: plots.plot_comparison(*case))
    page.write(tmp_path / "page.html", "A title", shown)
    heights = "return all('svg').map(x => x.getBoundingClientRect().height)"
    for width, name in {WIDE: "wide", NARROW: "tall"}.items():
        browser.open(tmp_path / "page.html", width, dark=True)
        wide, tall = browser.ask(heights)
        assert (wide > 200, tall > 200) == (name == "wide", name == "tall")
        assert browser.hidden(f"svg.{name} text") == []
        assert browser.overlaps(f"svg.{name} text") == []
        photograph = browser.photograph(tmp_path / "page.png")
        assert (photograph.mean(axis=2) < 60).mean() > 0.6  # No white slab.
        light = browser.ask("return getComputedStyle(all('svg text')[0]).fill")
        assert light == "rgb(255, 255, 255)"


@drawn
def test_nothing_in_a_plot_is_cut_off_or_covered(plot, arguments):
    figure = plot(*arguments)
    figure.draw_without_rendering()
    (caption,) = figure.texts
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    boxes.append(caption.get_window_extent())
    for index, box in enumerate(boxes):
        assert figure.bbox.contains(*box.min) and figure.bbox.contains(*box.max)
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend:
            area = legend.get_window_extent()
            groups = [x for x in axes.containers if isinstance(x, BarContainer)]
            bars = [bar.get_window_extent() for group in groups for bar in group]
            assert not any(area.overlaps(bar) for bar in bars)
            for line in axes.get_lines():
                path = line.get_path().transformed(line.get_transform())
                assert not path.interpolated(50).intersects_bbox(area, filled=False)


@drawn
@pytest.mark.once("A picture is drawn from numbers.")
def test_a_plot_looks_the_same_whatever_style_the_user_has(plot, arguments):
    def pixels(figure):
        figure.canvas.draw()
        return np.asarray(figure.canvas.buffer_rgba())

    expected = pixels(plot(*arguments))
    dark = {"font.size": 16, "figure.constrained_layout.use": True}
    with style.context(["dark_background", dark]):
        np.testing.assert_array_equal(pixels(plot(*arguments)), expected)


# Terminals ----------------------------------------------------------------------------


def compared():
    """Many policies with metrics of long names, and two of either."""
    policies = ["float32", "mixed_float16", "mixed_bfloat16", "mixed_float16 #2"]
    policies.append("auto (mixed_bfloat16)")
    names = ["sparse_top_k_categorical_accuracy_of_the_second_output", "loss"]
    many = {m: {p: [1234.5678, -0.00012345] for p in policies} for m in names}
    found = made(many), made(WORSE), made(WORSE, seconds_per_step=None)
    return "\n".join(map(str, found))


def searched():
    model = modelled("mixed_float16", 1e3)
    return keras_mp.find_float32_layers(model, (X, Y), verbose=0)


NO_KERNEL = "NotImplementedError: no kernel"


def examined():
    chip = devices.Device("cuda", "a GPU " + "with a long name " * 6, (9, 0))
    return doctor.Examination(
        versions={f"package_{n}": "1.2.3.dev20261122+cuda" for n in range(5)},
        driver="570.86.15",
        recommended=hardware.Recommendation("mixed_float16", "It is " * 30, (chip,)),
        side=4096,
        products=(
            doctor.Product("float32", 123456.789, 1.0),
            doctor.Product("float16", failure=NO_KERNEL + " no kernel" * 3),
        ),
        missing=("word " * 40,),
    )


WIDTH = 80
# Module -> a table of it with the longest that can stand there, and what it must show.
TABLES = {
    "policies/rule.py": (
        lambda: keras_mp.MixedFloat16(float32=[f"{LONG}/{LONG}/.*"]).rules,
        f"{LONG}/{LONG}",
    ),
    "tools/comparison/comparison_report.py": (compared, "mixed_bfloat16"),
    "tools/doctor.py": (examined, NO_KERNEL),
    "tools/float32_search/search_report.py": (searched, f"a_{LONG}/<img"),
    "tools/inspection/layer_report.py": (
        lambda: keras_mp.inspect(modelled("mixed_float16")),
        f"a_{LONG}/{LONG}",
    ),
    "tools/diagnosis/diagnosis_report.py": (
        lambda: diagnosed("mixed_float16", 1e3),
        f"a_{LONG}/{LONG}",
    ),
}
PACKAGE = pathlib.Path(keras_mp.__file__).parent


def test_every_module_that_prints_a_table_is_among_these():
    prints = re.compile(
        r"^from (keras_mp\.tables|rich\.table) import .*\bTable\b",
        re.MULTILINE,
    )
    files = [p for p in PACKAGE.rglob("*.py") if prints.search(p.read_text())]
    found = {p.relative_to(PACKAGE).as_posix() for p in files}
    assert found == {*TABLES}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_fits_80_columns_and_cuts_nothing_off(name):
    make, expected = TABLES[name]
    lines = str(make()).splitlines()
    too_long = [line for line in lines if cell_len(line) > WIDTH]
    # A path, or a line to paste, that is longer than the screen stays one word.
    assert [line for line in too_long if " " in line.strip()] == []
    assert not any("…" in line for line in lines)
    # A long path goes on below itself, within its column.
    columns = [re.split("  +", line.strip()) for line in lines]
    joined = ["".join(c[i] for c in columns if len(c) > i) for i in (0, 1, 4, 5)]
    assert any(expected in text for text in joined)


def test_no_name_is_broken_but_where_a_word_ends():
    names = ["sequential/batch_normalization/gamma", "global_average_pooling2d"]
    names += ["activity_regularizer", "RetinaNetObjectDetector"]
    text = "which is said of it in many words, too many for a line"
    table = Table(("name", "what", "why"), [(name, text, text) for name in names])
    words = {word for line in table.text().splitlines() for word in line.split()}
    assert {"sequential/batch_normalization/", "gamma", *names[1:]} <= words
    note = "Written: /a/folder" + "/with/a/long/name" * 8
    assert note.split()[1] in Table((), [], notes=[note]).text().splitlines()


# Without a browser --------------------------------------------------------------------


@pytest.mark.parametrize(("ci", "ends"), [("", pytest.skip), ("true", pytest.fail)])
def test_without_a_browser_a_test_is_skipped_but_fails_in_continuous_integration(
    ci, ends, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(ends.Exception, match="apt-get install chromium"):
        required()
