"""`python -m benchmarks.readme`: what was measured, into the READMEs.

Between the markers `<!-- measured: SUITE -->` and `<!-- end of SUITE -->` stand the
tables that `benchmarks/SUITE.json` renders to, "not measured" where there is none.
"""

import pathlib
from collections.abc import Sequence

from benchmarks.command import SUITES, suite_named
from benchmarks.cost_tables import details
from benchmarks.results import Record, read

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
READMES = (FOLDER / "README.md", ROOT / "README.md")


def main() -> None:
    """Renders every table again."""
    for path in READMES:
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")


def rendered(text: str, folder: pathlib.Path = FOLDER) -> str:
    """A README with the tables between its markers made again.

    Args:
        text: the README.
        folder: where the JSON files are.
    """
    for suite in SUITES:
        begin, end = f"<!-- measured: {suite} -->\n", f"<!-- end of {suite} -->"
        before, found, rest = text.partition(begin)
        if found:
            _, _, after = rest.partition(end)
            text = f"{before}{begin}\n{_section(suite, folder)}\n\n{end}{after}"
    return text


def _section(suite: str, folder: pathlib.Path) -> str:
    records = read(folder / f"{suite}.json", suite)
    parts = [
        *_origins(records),
        *(t.markdown() for t in suite_named(suite).tables(records, whole=True)),
    ]
    if suite == "cost" and records:
        table = details(records).markdown()
        parts.append(
            f"<details><summary>Quartiles, pairs, times</summary>\n\n{table}\n\n"
            "</details>"
        )
    return "\n\n".join(parts)


def _origins(records: Sequence[Record]) -> list[str]:
    """One line for each device, with all versions and commits that were measured."""
    lines = []
    for device in dict.fromkeys(r["device"] for r in records if "device" in r):
        mine = [r for r in records if r.get("device") == device]
        versions = dict.fromkeys(
            f"{name} {version}" for r in mine for name, version in r["versions"].items()
        )
        commits = dict.fromkeys(f"{r['commit']}" for r in mine)
        days = sorted({r["day"] for r in mine})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        lines.append(
            f"Measured on {device}, {when}, commit {', '.join(commits)}; "
            f"{', '.join(versions)}."
        )
    return lines


if __name__ == "__main__":
    main()
