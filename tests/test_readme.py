"""The code blocks of README run, in their order, as they stand."""

import os
import re
import subprocess
import sys

import documents
from backends import BACKEND
from documents import README

import keras_mp


def test_the_code_of_readme_runs_and_does_what_it_says(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)  # Put back: a block sets it.
    names = documents.run(README)
    hidden, softmax = names["model"].layers
    assert (hidden.compute_dtype, softmax.compute_dtype) == ("float16", "float32")
    assert isinstance(names["model"].optimizer, keras_mp.LossScaleOptimizer)


def test_the_quick_start_runs_where_it_is_pasted(tmp_path):
    code = documents.blocks(README)[0]["code"]
    script = tmp_path / "train.py"
    script.write_text(code.replace('= "jax"', f'= "{BACKEND}"'))
    environment = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    environment["PYTHONPATH"] = str(README.parent)
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "8/8" in done.stdout and "loss" in done.stdout


def test_every_file_that_a_link_leads_to_is_there():
    for target in re.findall(
        r"\]\(([^)#]+)[^)]*\)|srcset=\"(.*?)\"", README.read_text()
    ):
        assert (README.parent / "".join(target)).exists(), target


def test_every_name_of_the_package_that_a_text_has_exists():
    root = README.parent
    texts = [README, root / "CHANGELOG.md", *documents.PAGES]
    for path in [*texts, *(root / "notebooks").glob("*.ipynb")]:
        for name in set(
            re.findall(r"\bkeras_mp((?:\.[A-Za-z_]\w*)+)", path.read_text())
        ):
            found = keras_mp
            for part in name.split(".")[1:]:
                assert hasattr(found, part), f"{path.name} has keras_mp{name}"
                found = getattr(found, part)
