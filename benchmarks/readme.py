"""`python -m benchmarks.readme`: writes the tables of the results into the READMEs.

The tables of `benchmarks/SUITE.json` go between `<!-- measured: SUITE -->` and
`<!-- end of SUITE -->`, with "not measured" if there is no result. If a suite names a
few cases, these go between `<!-- in short: SUITE -->` and the same end, and one table
with a row for each of them between `<!-- at a glance: SUITE -->` and the same end.
"""

import pathlib
from collections.abc import Sequence

from benchmarks import SUITES
from benchmarks.cost.cost_tables import details
from benchmarks.results import Record, read
from benchmarks.suites import suite_named

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
PICTURES = ROOT / "docs" / "images"
READMES = (
    FOLDER / "README.md",
    ROOT / "README.md",
    ROOT / "docs" / "start" / "hardware.md",
    ROOT / "docs" / "guides" / "what_it_costs.md",
)


def main() -> None:
    """Renders all tables and pictures anew."""
    for path in READMES:
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
    for path, svg in pictures().items():
        path.write_text(svg, encoding="utf-8")


def pictures(folder: pathlib.Path = FOLDER) -> dict[pathlib.Path, str]:
    """The pictures of README as SVG, by their paths."""
    # Imported here, because it needs matplotlib.
    from benchmarks.quality import picture

    records = read(folder / "quality.json", "quality")
    mine = [record for record in records if record["backend"] == "jax"]
    return {
        PICTURES / f"quality-{name}.svg": picture.svg(mine, dark)
        for name, dark in {"light": False, "dark": True}.items()
    }


def rendered(text: str, folder: pathlib.Path = FOLDER) -> str:
    """A README with new tables between its markers.

    Args:
        text: the README.
        folder: where the JSON files are.
    """
    for suite in SUITES:
        for name, section in _SECTIONS.items():
            begin, end = f"<!-- {name}: {suite} -->\n", f"<!-- end of {suite} -->"
            before, found, rest = text.partition(begin)
            if found:
                _, _, after = rest.partition(end)
                text = f"{before}{begin}\n{section(suite, folder)}\n\n{end}{after}"
    return text


def _in_short(suite: str, folder: pathlib.Path) -> str:
    records = read(folder / f"{suite}.json", suite)
    found = suite_named(suite)
    records = [record for record in records if record["case"] in found.in_short]
    tables = (table.markdown() for table in found.tables(records))
    return "\n\n".join([*tables, *_ages(records, _verb(suite))])


def _at_a_glance(suite: str, folder: pathlib.Path) -> str:
    records = read(folder / f"{suite}.json", suite)
    glance = suite_named(suite).glance
    assert glance, f"{suite} has no table of that kind"
    table, used = glance(records)
    return "\n\n".join([table.markdown(), *_ages(used, _verb(suite))])


def _verb(suite: str) -> str:
    return "Compiled for" if suite == "compiled" else "Measured on"


def _ages(records: Sequence[Record], verb: str) -> list[str]:
    """When, and at which commits of ours, each backend was measured on each device."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if "device" in record:
            found.setdefault((record["device"], record["backend"]), []).append(record)
    parts = [
        f"{device}, {backend}: {max(r['day'] for r in mine)}, commit "
        + ", ".join(dict.fromkeys(str(r["commit"]) for r in mine))
        for (device, backend), mine in found.items()
    ]
    return [f"{verb} {'; '.join(parts)}."] if parts else []


def _section(suite: str, folder: pathlib.Path) -> str:
    records = read(folder / f"{suite}.json", suite)
    parts = [
        *_origins(records, _verb(suite)),
        *(t.markdown() for t in suite_named(suite).tables(records, whole=True)),
    ]
    if suite == "cost" and records:
        table = details(records).markdown()
        parts.append(
            f"<details><summary>Quartiles, pairs, times</summary>\n\n{table}\n\n"
            "</details>"
        )
    return "\n\n".join(parts)


def _origins(records: Sequence[Record], verb: str) -> list[str]:
    """One line for each device, with all its versions, commits and days."""
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
            f"{verb} {device}, {when}, commit {', '.join(commits)}; "
            f"{', '.join(versions)}."
        )
    return lines


_SECTIONS = {"measured": _section, "in short": _in_short, "at a glance": _at_a_glance}

if __name__ == "__main__":
    main()
