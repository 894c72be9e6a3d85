"""The description of the package on an index: README, readable without the repository.

All else stands in pyproject.toml.
"""

import pathlib
import re
import tomllib

from setuptools import setup

ROOT = pathlib.Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FILES = PROJECT["project"]["urls"]["Source"] + "/blob/main/"


def description() -> str:
    """README with pictures in words, links to the source, and no marks of ours."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r'<picture>.*?alt="(.*?)".*?</picture>', r"\1.", text, flags=re.S)
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.S)
    return re.sub(r"\]\((?!https?:|#)", f"]({FILES}", text)


setup(long_description=description(), long_description_content_type="text/markdown")
