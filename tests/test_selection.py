"""`make test` leaves out what is slow, each with a reason, and no entry of a table."""

import pytest
import selection

pytestmark = pytest.mark.once("It asks pytest alone.")

TABLE = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("row", [("a", 1), ("a", 2), ("b", 2), ("b", 1)])
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_table(row, policy):
    pass

@pytest.mark.sampled(by=lambda number: number % 3)
@pytest.mark.parametrize("number", range(9))
def test_by(number):
    pass

@pytest.mark.slow("it takes long")
def test_slow():
    pass
"""
UNEXPLAINED = """
import pytest

@pytest.mark.slow
def test_slow():
    pass
"""


class Collected:
    """Keeps what pytest has collected."""

    def pytest_collection_modifyitems(self, items):
        self.items = [*items]


def collected(folder, text):
    """What pytest collects from these tests."""
    path = folder / f"{folder.name}.py"  # Modules of one name would be taken for one.
    path.write_text(text)
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--noconftest"]
    seen = Collected()
    pytest.main([str(path), *options, f"--rootdir={folder}"], [seen])
    return seen.items


def test_each_entry_of_a_table_is_tested_without_what_is_slow(tmp_path):
    items = collected(tmp_path, TABLE)
    selection.mark_what_is_slow(items)
    slow = {item for item in items if item.get_closest_marker("slow")}
    kept = [item.callspec.params for item in items if item not in slow]
    rows = [params for params in kept if "row" in params]
    assert len(rows) == 2 and len(items) == 8 + 9 + 1
    assert {cell for params in rows for cell in params["row"]} == {"a", "b", 1, 2}
    assert {params["policy"] for params in rows} == {"float16", "bfloat16"}
    assert [p["number"] for p in kept if "number" in p] == [0, 1, 2]
    assert {selection.reason(item, "slow") for item in slow} == {
        selection.OF_A_TABLE,
        "it takes long",
    }


def test_a_mark_without_a_reason_is_an_error(tmp_path):
    items = collected(tmp_path, UNEXPLAINED)
    with pytest.raises(pytest.UsageError, match="`slow` must be given a reason"):
        selection.mark_what_is_slow(items)
