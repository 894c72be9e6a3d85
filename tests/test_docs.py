"""The documentation: its code runs, it names all that is public, and it can be read."""

import os
import pathlib
import re
import subprocess
import sys

import browser as windows
import documents
import keras
import numpy as np
import pytest
from backends import BACKEND, same_bits, values

import keras_mp
from keras_mp.policies.weights import LARGE

once = pytest.mark.once("It reads pages, which are the same on every backend.")
DOCS = documents.REPOSITORY / "docs"
# A page with code for one backend runs on each, any other on the quickest.
WITH_CODE = [
    pytest.param(
        path,
        marks=[] if any(b["backend"] for b in blocks) else [pytest.mark.trains_many],
    )
    for path in documents.PAGES
    if (blocks := documents.blocks(path))
]
THEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
WIDTHS = pytest.mark.parametrize("width", [windows.WIDE, windows.NARROW])


def name_of(path):
    return path.relative_to(DOCS).with_suffix("").as_posix()


@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs_as_it_stands(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # Some save models.
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)  # Put back: a block may set it.
    if BACKEND == "tensorflow" and path.stem == "several_devices":
        import tensorflow as tf
        from engine_tensorflow import mirrored

        strategy = mirrored(2)  # The one of this process, see there.
        monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: strategy)

    def after(names):
        if keras.distribution.distribution() is not None:
            model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
            model.compile("adam", "mse")
            (loss,) = model.fit(names["x"], names["y"], verbose=0).history["loss"]
            assert np.isfinite(loss) and hasattr(model.optimizer, "skipped_steps")

    try:
        assert documents.run(path, after)
    finally:
        if BACKEND == "jax":
            keras.distribution.set_distribution(None)


@pytest.mark.skipif(BACKEND == "jax", reason="there the step undoes it by itself")
@pytest.mark.parametrize("bad", [False, True])
def test_the_loop_of_the_guide_puts_statistics_back_after_a_skipped_step(bad):
    names = documents.run(DOCS / "guides/custom_loops.md")
    layers = keras.layers
    with keras_mp.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.BatchNormalization(),
                layers.Dense(10, "softmax"),
            ]
        )
    optimizer = keras_mp.LossScaleOptimizer("adam")
    optimizer.build(model.trainable_variables)
    names |= {"model": model, "optimizer": optimizer}
    names["variables"] = model.trainable_variables
    step = names["undoing"](names["train_step"])
    if BACKEND == "tensorflow":
        step = names["tf"].function(step)
    x = np.full((8, 4), np.nan if bad else 3.0, "float32")
    before = values(model.non_trainable_variables)
    step(x, np.arange(8))
    assert int(optimizer.skipped_steps) == bad
    assert same_bits(before, values(model.non_trainable_variables)) == bad


def test_layers_compute_in_what_the_guide_says():
    names = documents.run(DOCS / "guides/what_stays_in_float32.md")
    assert [row.compute_dtype for row in names["inspection"].layers] == [
        "float16",
        "float32",
    ]

    def computed(name):
        result = names[name](np.ones((2, 3), "float32"))
        return keras.backend.standardize_dtype(result.dtype)

    assert [computed(n) for n in ("layer", "head", "half", "norm")] == [
        *("float16", "float32", "float16", "float32")
    ]


@once
def test_the_guide_says_how_large_a_large_head_is():
    text = (DOCS / "guides/large_heads_and_attention.md").read_text()
    assert f"of {LARGE:,} weights or more" in text


@once
def test_every_test_that_is_named_is_there():
    tests = "".join(p.read_text() for p in pathlib.Path(__file__).parent.glob("*.py"))
    text = (DOCS / "coming_from/keras.md").read_text()
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in tests] == []


@once
def test_every_public_name_is_in_the_reference():
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    named = re.findall(r"\.\. auto\w+:: (\w+)", text)
    public = {*keras_mp.__all__, *keras_mp.callbacks.__all__} - {"callbacks"}
    assert sorted(named) == sorted(public)
    code = "".join(
        block["code"]
        for path in (DOCS / "reference").glob("*.md")
        for block in documents.blocks(path)
    )
    assert [name for name in public if not re.search(rf"\.{name}\b", code)] == []
    methods = re.search(r":members: (.*)", text)[1].split(", ")
    own = vars(keras_mp.LossScaleOptimizer)
    as_keras = {"build", "finalize_variable_values", "get_config", "from_config"}
    as_keras |= {"save_own_variables", "load_own_variables", "optimizers"}
    assert {n for n in own if n[0] != "_"} - as_keras == set(methods)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built pages."""
    pytest.importorskip("furo")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet"]
    done = subprocess.run(
        [*command, "-d", folder / "doctrees", DOCS, folder / "html"],
        env={**os.environ, "PYTHONPATH": str(documents.REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@THEMES
@WIDTHS
@pytest.mark.parametrize(
    "page",
    [
        "index",
        "start/first_training",
        "guides/what_stays_in_float32",
        "coming_from/keras",
    ]
    + ["coming_from/torch_amp", "reference/loss_scaling", "how_it_works/measured"]
    + ["notebooks/01_quickstart"],
)
@pytest.mark.sampled
def test_a_page_can_be_read_at_a_desk_and_on_a_telephone(
    browser, site, page, width, dark
):
    browser.open(site / f"{page}.html", width, dark)
    assert browser.hidden("article h1") == []
    assert browser.sideways() == []
    assert browser.pale(within="article p, article li, article td") == []
    assert browser.complaints() == []
    assert browser.texts("article h1")[0].strip("#¶ ")


@once
def test_no_page_loads_anything_from_elsewhere(site):
    elsewhere = r"[\"'(](?:https?:)?//[^\"')]+"
    tags = re.compile(rf"<(?:script|link|img|iframe|source)\b[^>]*={elsewhere}")
    styles = re.compile(rf"(?:url|@import)\s*\(?{elsewhere}")
    pages, sheets = [*site.rglob("*.html")], [*site.rglob("*.css")]
    assert len(pages) > 20 and sheets
    assert [p.name for p in pages if tags.search(p.read_text())] == []
    assert [p.name for p in sheets if styles.search(p.read_text())] == []
    assert tags.search('<script src="https://cdn.example/x.js">')
    assert styles.search("url(//fonts.example/x.woff)")


def test_a_docstrings_code_and_arguments_look_like_those(browser, site):
    browser.open(site / "reference/loss_scaling.html")
    code = browser.texts("article dd div.highlight")
    assert [text for text in code if "opt.apply(scaled_grads" in text], code
    fields = browser.texts("dl.field-list dt")
    assert any(text.lower().startswith("parameters") for text in fields)
    assert not [p for p in browser.texts("article dd p") if "```" in p or "Args:" in p]


@once
def test_a_docstrings_link_is_one(site):
    pages = [page.read_text() for page in site.rglob("reference/*.html")]
    assert any(">Train With Mixed Precision, NVIDIA</a>" in page for page in pages)
    assert not any("](" in page for page in pages)


@pytest.mark.parametrize("page", ["keras", "jax", "lightning", "tf_keras", "torch_amp"])
def test_a_table_of_text_fits_on_a_telephone(browser, site, page):
    browser.open(site / f"coming_from/{page}.html", windows.NARROW)
    widths = "return [...document.querySelectorAll('article table')].map(t => "
    assert all(x <= windows.NARROW for x in browser.ask(f"{widths} t.scrollWidth)"))
    assert browser.hidden("article td") == []


def test_the_rules_and_the_seams_are_those_of_the_code(browser, site):
    browser.open(site / "guides/what_stays_in_float32.html")
    rules = [rule.name for rule in keras_mp.MixedFloat16().rules]
    named = browser.texts("article table tbody td:first-child")
    assert len(named) > 15 and {*named} <= {*rules}  # Tests may have added rules.
    browser.open(site / "how_it_works/seams.html")
    cells = browser.texts("article table tbody td:first-child")
    assert {"Model.make_train_function", "remat", "gelu selu"} <= {*cells}
    for_a_while = " ".join(browser.texts("article li"))
    assert "Operation.__call__, while a diagnostic" in for_a_while
