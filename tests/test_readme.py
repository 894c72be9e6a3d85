"""The code blocks of README run, in their order, as they stand."""

import os
import re
import subprocess
import sys
import zipfile

import documents
from backends import BACKEND
from documents import README
from wheels import built_wheel

import keras_mp


def test_the_code_of_readme_runs_and_does_what_it_says(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)  # Put back: a block sets it.
    names = documents.run(README)
    hidden, softmax = names["model"].layers
    assert (hidden.compute_dtype, softmax.compute_dtype) == ("float16", "float32")
    assert isinstance(names["model"].optimizer, keras_mp.LossScaleOptimizer)


def test_the_quick_start_runs_with_the_wheel_and_one_backend(tmp_path):
    built, there = tmp_path / "built", tmp_path / "there"
    built.mkdir()
    zipfile.ZipFile(built_wheel(built)).extractall(tmp_path / "wheel")
    there.mkdir()
    absent = {"jax", "tensorflow", "torch", "matplotlib", "sklearn"} - {BACKEND}
    # As if nothing else were installed: to import what is None is an error.
    alone = f"import sys\nsys.modules.update(dict.fromkeys({absent}))"
    (tmp_path / "wheel" / "sitecustomize.py").write_text(alone)
    code = documents.blocks(README)[0]["code"].replace('= "jax"', f'= "{BACKEND}"')
    (there / "train.py").write_text(f"{code}\nprint(keras_mp.__file__)")
    environment = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    environment["PYTHONPATH"] = str(tmp_path / "wheel")
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=there,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "8/8" in done.stdout and "loss" in done.stdout
    assert str(tmp_path / "wheel") in done.stdout.splitlines()[-1]


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
