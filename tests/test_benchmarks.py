"""`python -m benchmarks`: what it compares, how it times, what it writes; untimed."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from backends import BACKEND

from benchmarks import (
    BACKENDS,
    SUITES,
    models,
    processes,
    readme,
    results,
    run,
    suites,
    worker,
)
from benchmarks import __main__ as command
from benchmarks.cost import agreement, cost_tables
from benchmarks.cost import suite as cost
from benchmarks.cost.cases import CASES, case_named
from benchmarks.cost.peers import PEERS, steps_on
from benchmarks.pairs import CONTROL, MIN_PAIRS, is_conclusive, quartiles, time_in_pairs
from benchmarks.processes import Job
from benchmarks.quality import quality_tables
from benchmarks.quality import suite as quality
from benchmarks.results import Results
from benchmarks.seams import suite as seams
from benchmarks.suites import Suite
from benchmarks.train import suite as train
from benchmarks.train import train_tables
from benchmarks.train.cases import TRAIN_CASES, _operations_of_convolutions
from benchmarks.train.device import peak
from keras_mp import installing
from keras_mp.config import policy_scope
from keras_mp.policies import heads

# Peers and compilers say what they like.
pytestmark = pytest.mark.filterwarnings("ignore")
once = pytest.mark.once("What is measured and drawn is the same on every backend.")
PEERS_HERE = [p.name for p in PEERS if BACKEND in p.backends and p.installed]
# The cases that differ in more than their sizes.
DIFFERENT = list(
    {(c.make, c.jit): c for c in reversed(CASES) if BACKEND in c.backends}.values()
)
# The least to compile.
SMALL = "transformer" if BACKEND == "torch" else "wide"


class Clock:
    """A clock that only moves when a step is taken."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self):
        return self.now

    def step(self, seconds, name=""):
        def run(steps):
            self.order.append((name, steps))
            self.now += seconds * steps

        return run


# Cases and peers ------------------------------------------------------------------


@pytest.mark.parametrize("case", DIFFERENT, ids=lambda case: case.name)
@pytest.mark.slow("It is about other packages; ours has an oracle elsewhere.")
def test_every_peer_that_is_here_agrees_in_every_case(case):
    found = next(cost.measure(case.name, BACKEND, PEERS_HERE, 0.0, smallest=True))
    families = {p.name: p.family for p in PEERS}
    asked = [p for p in PEERS_HERE if case.jit or families[p] == "keras"]
    assert list(found["peers"]) == asked
    for peer in found["peers"].values():
        assert peer["ratio"]["number"] >= MIN_PAIRS
        assert peer["first_step_seconds"] > 0
    assert {"device", "versions", "commit"} <= set(found)
    json.dumps(found)


def small(name, group):
    return getattr(steps_on(BACKEND), group)[name](
        case_named(SMALL).problem(True), True
    )


class Wrong:
    """A step that goes wrong in some way."""

    def __init__(self, way):
        self.step, self.way = small("keras_mp", "scaled"), way

    def run(self, steps, nonfinite=False):
        if self.way == "takes one too many":
            steps += 1
        self.step.run(steps, nonfinite and self.way != "does not skip")

    def weights(self):
        weights = self.step.weights()
        return [w + 1 for w in weights] if self.way == "starts elsewhere" else weights

    def moments(self):
        moments = self.step.moments()
        scale = 2.0**15 if self.way == "does not unscale" else 1
        return [m * scale for m in moments]


def test_a_step_that_goes_wrong_is_found():
    reference = agreement.Reference(small("keras", "unscaled"))
    for way, difference in {
        "": "",
        "takes one too many": "after 3 steps the weights are off",
        "does not skip": "is not skipped",
        "starts elsewhere": "other weights",
        "does not unscale": "the first moments are off",
    }.items():
        found = reference.check(Wrong(way)).difference
        assert difference in found and bool(found) == bool(difference), way


def test_who_does_not_agree_is_not_timed(monkeypatch):
    monkeypatch.setitem(
        steps_on(BACKEND).scaled, "keras", lambda problem, jit: Wrong("does not skip")
    )
    found = next(cost.measure(SMALL, BACKEND, ["keras"], 0.0, smallest=True))
    assert set(found["peers"]["keras"]) == {"disagrees"}
    assert found["controls"] == {}


@pytest.mark.slow("It measures; the package does not depend on it.")
def test_who_is_slow_is_timed_only_where_it_is_named(monkeypatch):
    case = case_named(SMALL)._replace(slow=("keras",))
    monkeypatch.setattr(cost, "case_named", lambda name: case)
    everyone = [p.name for p in PEERS]
    found = next(cost.measure(SMALL, BACKEND, everyone, 0.0, smallest=True))
    assert "--peer keras" in found["peers"]["keras"]["slow"]
    assert cost_tables.cell(found, "keras", "keras") == "slow"
    found = next(cost.measure(SMALL, BACKEND, ["keras"], 0.0, smallest=True))
    assert "ratio" in found["peers"]["keras"]


def test_a_missing_peer_is_reported(monkeypatch):
    missing = PEERS[1]._replace(package="no_such_package", distribution="no-such")
    monkeypatch.setattr(cost, "PEERS", (missing,))
    found = next(cost.measure(SMALL, BACKEND, ["keras"], 0.0, smallest=True))
    assert found["peers"] == {"keras": {"missing": "pip install no-such"}}
    text = cost_tables.tables([found])[0].text()
    assert "missing" in text and "pip install no-such" in text


# Timing -----------------------------------------------------------------------------


@once
def test_the_ratio_is_that_of_the_times_and_the_order_is_random():
    clock = Clock()
    others = {CONTROL: clock.step(0.01, "control"), "slow": clock.step(0.02, "slow")}
    timings = time_in_pairs(clock.step(0.01, "base"), others, 5.0, clock=clock)
    assert timings["slow"].ratio.median == pytest.approx(2)
    assert timings["slow"].seconds.median == pytest.approx(0.02)
    assert is_conclusive(timings[CONTROL].ratio)
    stretches = clock.order[3:]  # The first three say how long a step takes.
    assert {steps for _, steps in stretches} == {3}
    pairs = [{a[0], b[0]} for a, b in zip(stretches[::2], stretches[1::2], strict=True)]
    assert all("base" in pair and len(pair) == 2 for pair in pairs)
    firsts = {name for name, _ in stretches[::2]}
    assert firsts == {"base", "control", "slow"}


def timed(seconds, **others):
    """For so long, what takes 0.1 s beside what takes as long as is said."""
    clock = Clock()
    steps = {name: clock.step(each) for name, each in others.items()}
    return time_in_pairs(clock.step(0.1), steps, seconds, clock=clock)


@once
@pytest.mark.parametrize(
    ("control", "conclusive"),
    [(1.0, True), (1.029, True), (1.031, False), (0.96, False)],
)
def test_a_control_that_is_off_makes_a_case_inconclusive(control, conclusive):
    timings = timed(3.0, **{CONTROL: 0.1 * control})
    assert is_conclusive(timings[CONTROL].ratio) is conclusive
    text = cost_tables.tables([a_cost(control=control)])[0].text()
    assert ("1.20?" in text) is not conclusive
    assert ("inconclusive" in text) is not conclusive


@once
def test_what_is_slow_is_timed_a_few_times_all_the_same():
    assert timed(1.0, slow=100)["slow"].ratio.number == MIN_PAIRS


@once
def test_quartiles():
    assert quartiles([4, 1, 2, 3, 5]) == (3, 2, 4, 5)
    assert quartiles([7.0]) == (7, 7, 7, 1)


# Results ------------------------------------------------------------------------------


def a_cost(case="wide", backend="jax", control=1.0, **peers):
    ratio = {"median": 1.2, "lower": 1.19, "upper": 1.21, "number": 9}
    return {
        "case": case,
        "backend": backend,
        "device": "a processor",
        "versions": {"keras": "3"},
        "commit": "abc",
        "day": "2030-01-01",
        "controls": {
            "keras": {
                "ratio": ratio | {"median": control},
                "base_seconds": ratio,
                "conclusive": abs(control - 1) <= 0.03,
            }
        },
        "peers": {
            "keras_mp": {
                "ratio": ratio,
                "step_seconds": ratio,
                "first_step_seconds": 1.0,
            },
            **peers,
        },
    }


@once
def test_records_are_renewed_and_stay_whole_if_one_is_cut_off(tmp_path, monkeypatch):
    path = tmp_path / "cost.json"
    kept = Results(path, "cost", ("case", "backend"))
    kept.add({"case": "a", "backend": "jax", "n": 1})
    kept.add({"case": "b", "backend": "jax", "n": 2})
    again = Results(path, "cost", ("case", "backend"))
    again.add({"case": "a", "backend": "jax", "n": 3})
    assert [r["n"] for r in results.read(path, "cost")] == [3, 2]

    def cut_off(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(results.os, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        again.add({"case": "c", "backend": "jax", "n": 4})
    assert [r["n"] for r in results.read(path, "cost")] == [3, 2]


@once
@pytest.mark.parametrize("text", ["", "[]", '{"suite": "train", "records": []}'])
def test_another_file_is_not_overwritten(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="`out` must be a new file, or one of the"):
        Results(path, "cost", ("case",))


# Of its three cases the second fails after its first record.
STUB = Suite(
    "stub",
    [{"case": case, "backend": BACKEND} for case in "abc"],
    measure=lambda **arguments: iter(()),
    tables=lambda records, whole=False: [],
    limit=60.0,
)


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """Runs STUB, or a variant of it, with a worker of a few lines."""
    program = """
import json, sys
job = json.loads(sys.argv[1])
case = job["about"]["case"]
print("ready null", flush=True)
sys.stdin.readline()
print("part 0.5", flush=True)
print("record " + json.dumps({"n": 1}), flush=True)
if case == "b":
    raise SystemExit("no more memory")
"""
    monkeypatch.setattr(processes, "_PROGRAM", program)

    def run_stub(suite=STUB, **options):
        monkeypatch.setattr(run, "suite_named", lambda name: suite)
        out = str(tmp_path / "stub.json")
        run.measure(run.plan("stub", out=out, **options), verbose=0)
        return results.read(tmp_path / "stub.json", "stub")

    return run_stub


@once
def test_what_was_measured_before_a_failure_stays_beside_it(stub):
    records = stub()
    assert [r["case"] for r in records] == ["a", "b", "c"]
    assert all(r["n"] == 1 for r in records)
    assert "no more memory" in records[1]["failure"]
    assert "failure" not in records[0]


@once
def test_a_case_that_takes_long_is_measured_when_it_is_named_and_there_is_time(stub):
    assert stub(dataclasses.replace(STUB, budget=1.0)) == []
    suite = dataclasses.replace(STUB, slow=("b",))
    assert [r["case"] for r in stub(suite)] == ["a", "c"]
    assert [r["case"] for r in stub(suite, cases=["b"])] == ["a", "c", "b"]


@once
def test_resume_leaves_out_what_is_there_and_has_not_failed(stub, monkeypatch):
    stub(cases=["a", "b"])
    begun = []

    def noted(job, core, real=run.Process):
        begun.append(job.about["case"])
        return real(job, core)

    monkeypatch.setattr(run, "Process", noted)
    stub(resume=True)
    assert begun == ["b", "c"]


@once
def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(processes, "_PROGRAM", "import time; time.sleep(100)")
    process = processes.Process(Job("x", {"backend": "jax"}, {}, limit=1.0))
    failure = process.records(0.2, lambda record: None, lambda part: None)
    assert failure == "took longer than 0 s"


WRITES_ITS_HEAP = """
import json, os, sys
print("ready null", flush=True)
sys.stdin.readline()
heap = {name: value for name, value in os.environ.items() if "MALLOC_" in name}
print("record", json.dumps({"heap": heap}))
"""


@once
@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_timed_keeps_its_memory(monkeypatch, pinned):
    settings = processes._KEEPING_MEMORY
    for name in [name for name in os.environ if "MALLOC_" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(processes, "_PROGRAM", WRITES_ITS_HEAP)
    process = processes.Process(Job("x", {"backend": "jax"}, {}, 60.0, pinned=pinned))
    found = []
    assert not process.records(60, found.append, print)
    assert settings and found[0]["heap"] == (settings if pinned else {})


@once
@pytest.mark.skipif(not processes.CAN_PIN, reason="This system stops no processes.")
@pytest.mark.parametrize("pinned", [True, False])
def test_the_next_process_stands_still_while_one_is_timed(
    tmp_path, monkeypatch, pinned
):
    monkeypatch.setattr(processes, "_PROGRAM", WRITES_OR_WATCHES)
    path = tmp_path / "written"
    path.touch()

    def started(case):
        about = {"case": case, "backend": "jax"}
        job = Job("x", about, {"path": str(path)}, limit=60.0, pinned=pinned)
        return processes.Process(job)

    found = []
    writes = started("writes")
    try:
        while not path.stat().st_size:
            time.sleep(0.01)
        assert not started("watches").records(60, found.append, print, writes)
        size = path.stat().st_size
        for _ in range(1000):
            if path.stat().st_size > size:
                break
            time.sleep(0.01)
        assert path.stat().st_size > size, "it does not go on"
    finally:
        writes.end()
    assert (found[0]["written"] == 0) == pinned


WRITES_OR_WATCHES = """
import json, os, sys, time
job = json.loads(sys.argv[1])
path = job["options"]["path"]
if job["about"]["case"] == "writes":
    os.fork()  # What it has started stands still too.
    while True:
        with open(path, "a") as file:
            file.write("x")
        time.sleep(0.01)
print("ready null", flush=True)
sys.stdin.readline()
time.sleep(0.2)
before = os.path.getsize(path)
time.sleep(0.5)
print("record", json.dumps({"written": os.path.getsize(path) - before}), flush=True)
"""


@once
def test_a_worker_writes_records_as_json_whatever_else_is_printed(capsys, monkeypatch):
    class Fake:
        @staticmethod
        def measure(case, backend, progress, ready):
            print("a framework says hello")
            ready()
            progress(0.5)
            yield {"x": float("nan"), "y": 1 / 3}

    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    monkeypatch.setattr(suites, "suite_named", lambda name: Fake)
    job = {"suite": "s", "about": {"case": "a", "backend": "b"}, "options": {}}
    worker.main(job)
    out = capsys.readouterr().out
    assert out == 'ready null\npart 0.5\nrecord {"x": null, "y": 0.333333}\n'


# Tables, and README -------------------------------------------------------------------


@once
@pytest.mark.parametrize("path", readme.READMES, ids=lambda p: p.parent.name)
def test_readme_has_what_the_json_renders_to(path):
    text = path.read_text(encoding="utf-8")
    assert readme.rendered(text) == text, "python -m benchmarks.readme renders it again"


@once
def test_what_pages_say_of_cpus_is_what_the_json_has():
    records = json.loads((readme.ROOT / "benchmarks/train.json").read_text())
    speeds = {
        (r["case"], r["backend"], r["precision"]): r["examples_per_second"]["median"]
        for r in records["records"]
        if "EPYC" in r["device"]
    }
    ratios = {
        dtype: [
            speeds[case, backend, precision] / speeds[case, backend, "float32"]
            for case, backend, precision in speeds
            if precision == f"mixed_{dtype}"
        ]
        for dtype in ("float16", "bfloat16")
    }
    ends = {d: f"{min(r):.2f} to {max(r):.2f} times" for d, r in ratios.items()}
    pages = {
        "README.md": ["bfloat16"],
        "docs/guides/float16_or_bfloat16.md": ["bfloat16"],
        "docs/start/hardware.md": ["bfloat16", "float16"],
    }
    for page, dtypes in pages.items():
        text = " ".join((readme.ROOT / page).read_text(encoding="utf-8").split())
        assert all(ends[dtype] in text for dtype in dtypes), page
    faster = sum(ratio > 1 for ratio in ratios["bfloat16"])
    assert (faster, len(ratios["bfloat16"]), max(ratios["float16"]) < 1) == (5, 8, True)


@once
def test_the_table_of_readme_compares_with_float32_of_the_same_backend():
    def record(backend, precision, speed, peak):
        about = {"on": "gpu", "case": "mlp", "backend": backend, "precision": precision}
        rate = {"examples_per_second": {"median": speed}, "peak_bytes": peak}
        return {**about, **rate, "what": "speed"}

    records = [
        record("jax", "tf32", 100.0, 8),
        record("jax", "mixed_float16", 250.0, 4),
        record("torch", "tf32", 50.0, 8),
        record("torch", "torch.amp", 200.0, 2),
        record("torch", "mixed_bfloat16", 300.0, 1),
        record("jax", "float32", 10.0, 8),
    ]
    table, used = train_tables.glance(records)
    title = TRAIN_CASES[0].title
    assert table.columns == ("", "", "torch.amp", "keras_mp")
    assert table.rows == [
        ("jax", title, "", "2.50 in 0.50"),
        ("torch", title, "4.00 in 0.25", ""),
    ]
    assert used == records[:4]


@once
def test_the_pictures_of_readme_show_what_the_json_has():
    def texts(svg):
        return re.findall(r"<text [^>]*>([^<]*)</text>", svg)

    for path, svg in readme.pictures().items():
        shown = texts(path.read_text(encoding="utf-8"))
        assert shown == texts(svg), "python -m benchmarks.readme draws it again"
        assert {"1.00", "keras_mp bfloat16"} <= {*shown}


@once
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_that_was_not_measured_says_so(suite, tmp_path):
    text = f"before\n<!-- measured: {suite} -->\n<!-- end of {suite} -->\nafter"
    rendered = readme.rendered(text, tmp_path)
    assert "not measured" in rendered
    assert rendered.startswith("before\n") and rendered.endswith("\nafter")
    assert readme.rendered(rendered, tmp_path) == rendered


@once
def test_numbers_go_from_the_json_into_readme(tmp_path):
    kept = Results(tmp_path / "cost.json", "cost", cost.SUITE.identity)
    kept.add(a_cost(flax={"missing": "pip install flax"}))
    text = "<!-- measured: cost -->\n<!-- end of cost -->"
    rendered = readme.rendered(text, tmp_path)
    assert "| 8 wide dense layers, 3 M weights | 1.20 | missing |" in rendered
    assert "| wide | jax | keras_mp | 1.200 | 1.190 to 1.210 | 9 |" in rendered
    assert "Measured on a processor, 2030-01-01, commit abc; keras 3." in rendered
    assert "| 200 small variables | not measured |" in rendered


def a_training(case, precision, what="speed", **entries):
    about = {"case": case, "backend": "jax", "precision": precision, "what": what}
    return {"on": "gpu", **about, **entries}


@once
def test_tables_fit_a_terminal():
    records = [a_cost(case.name, b) for case in CASES for b in case.backends]
    for record in records:
        measured, control = record["peers"]["keras_mp"], record["controls"]["keras"]
        record["peers"] = {p.name: measured for p in PEERS}
        record["controls"] |= dict.fromkeys(("optax", "torch"), control)
    speed = {
        "device": "NVIDIA H100 80GB HBM3",
        "batch": 4096,
        "examples_per_second": {"median": 12345.6},
        "peak_bytes": 12_300_000_000,
        "share_of_peak": 0.45,
    }
    trained = []
    for case in TRAIN_CASES:
        for p in train_tables.PRECISIONS:
            trained.append(a_training(case.name, p, **speed))
            trained.append(a_training(case.name, p, "fits", largest_batch=16384))
    for tables in (cost_tables.tables(records), train_tables.tables(trained)):
        for table in tables:
            text = table.text()
            assert max(len(line) for line in text.splitlines()) <= 80
            assert "…" not in text
    text = train_tables.tables(trained)[0].text()
    for number in ("12346", "1.00", "12.3 GB", "45%", "16384"):
        assert number in text


# The other suites ---------------------------------------------------------------------


@pytest.mark.skipif(BACKEND == "tensorflow", reason="train is for JAX and torch")
@pytest.mark.slow("It measures; the package does not depend on it.")
def test_a_training_configuration_is_measured(monkeypatch):
    monkeypatch.setattr(train, "STRETCH", 1e-9)
    monkeypatch.setattr(train, "STRETCHES", 2)
    found = next(train.measure("cpu", "mlp", BACKEND, "mixed_float16", "speed", 2))
    assert found["batch"] == 2 and found["skipped_steps"] is not None
    assert found["examples_per_second"]["median"] > 0
    assert found["operations_per_second"] > 0
    assert found["share_of_peak"] is None  # Of a processor nobody knows.
    assert (found["peak_bytes"] is None) == (BACKEND == "torch")


@pytest.mark.skipif(BACKEND != "torch", reason="torch's own networks")
@pytest.mark.parametrize("case", TRAIN_CASES[:2], ids=lambda case: case.name)
def test_torch_alone_trains_with_autocast_and_a_scaler(case):
    from benchmarks.train.peers import NETWORKS, AmpTrainer

    network = NETWORKS[case.name](**case.small_sizes)
    before = [w.detach().clone() for w in network.parameters()]
    trainer = AmpTrainer(network, *case.data(2, **case.small_sizes))
    trainer.run(2)
    pairs = zip(before, network.parameters(), strict=True)
    assert all((old != new).any() and new.isfinite().all() for old, new in pairs)


@once
def test_too_large_a_batch_is_halved_until_it_fits(monkeypatch):
    tried = []

    def speed_at(setting, batch, progress):
        tried.append(batch)
        if batch > 16:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to")
        return {"batch": batch}

    monkeypatch.setattr(train, "_speed_at", speed_at)
    monkeypatch.setattr(train, "forget", lambda backend: None)
    record = next(train.measure("cpu", "mlp", "jax", "float32", "speed", 64))
    assert record == {"batch": 16} and tried == [64, 32, 16]


@once
@pytest.mark.parametrize("capacity", [9, 100, 1000])
def test_the_largest_batch_that_fits_is_searched_for(monkeypatch, capacity):
    class Trainer:
        resident_bytes = 1000

        def __init__(self, batch):
            self.batch = batch

        def run(self, steps):
            if self.batch > capacity:
                raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(train, "forget", lambda backend: None)
    monkeypatch.setattr(train.engine, "measure_memory", lambda: lambda: 1000 + 10 * 16)
    monkeypatch.setattr(train, "device_memory", lambda backend: 1000 + 10 * capacity)
    monkeypatch.setattr(
        train._Setting, "trainer", lambda self, batch: (Trainer(batch), 1.0)
    )
    found = list(train.measure("cpu", "mlp", "jax", "float32", "fits", 16))
    assert 0.5 * capacity <= found[-1]["largest_batch"] <= capacity
    assert len(found) <= train.TRIES


@once
def test_a_framework_that_sees_no_gpu_is_an_error():
    with pytest.raises(RuntimeError, match="jax sees no GPU: install its build with"):
        next(train.measure("gpu", "mlp", "jax", "float32", "speed"))


@once
def test_peaks_are_those_of_the_device():
    assert peak("NVIDIA H100 80GB HBM3", "mixed_float16") == 989.4e12
    assert peak("NVIDIA H100 PCIe", "mixed_float16") == 756e12
    assert peak("NVIDIA A100-SXM4-40GB", "tf32") == 156e12
    assert peak("NVIDIA A10G", "float32") is None
    assert peak("Tesla V100-SXM2-16GB", "mixed_bfloat16") is None
    assert peak("a processor", "float32") is None


@once
def test_operations_of_the_forward_pass_are_those_of_the_literature():
    cases = {case.name: case for case in TRAIN_CASES}
    _, operations = cases["vit"].make(
        side=32, patch=8, width=8, depth=1, heads=2, classes=4
    )
    first, tokens = 2 * 16 * 3 * 64 * 8, 17
    block = 24 * tokens * 64 + 4 * tokens**2 * 8
    assert operations == first + block + 2 * 8 * 4
    # A stem at 8 x 8; a stage at 4 x 4 with its shortcut; the head.
    model = models.convolutions(side=8, filters=2, stages=1, classes=3)
    products = 9 * 3 * 2 * 64 + (9 * 2 * 2 + 9 * 2 * 2 + 2 * 2) * 16 + 2 * 3
    assert _operations_of_convolutions(model) == 2 * products


@pytest.mark.parametrize(
    "way", ["mixed_float16", quality_tables.UNSCALED, "bfloat16", quality_tables.SLOTS]
)
@pytest.mark.slow("It measures; the package does not depend on it.")
def test_a_quality_training_runs(way):
    *_, found = quality.measure("regression", BACKEND, way, seeds=2, smallest=True)
    assert len(found["values"]) == 2 and np.isfinite(found["values"]).all()
    counted = way == "mixed_float16"
    assert all((s is not None) == counted for s in found["skipped_steps"])


def test_stock_keras_is_keras_without_us():
    *_, found = quality.measure(
        "regression", BACKEND, "Keras' mixed_float16", seeds=1, smallest=True
    )
    assert found["skipped_steps"] == [None]
    assert not hasattr(keras.layers.Layer.__call__, "_keras_mp_original")


@once
def test_a_quality_table_says_what_differs_with_the_confidence_interval():
    def record(way, values):
        about = {"case": "regression", "backend": "jax", "way": way}
        return {**about, "values": values, "skipped_steps": [None] * len(values)}

    records = [
        record("float32", [1.0, 2.0, 3.0, 4.0, 5.0]),
        record("mixed_float16", [1.1, 2.3, 3.2, 4.2, 5.2]),
        record("bfloat16", [1.1, 1.9, 3.0, 4.1, 4.9]),
        record("unscaled", [1.0, 2.0, 3.0, 4.0, None]),
        record("mixed_bfloat16", [1.0]),
    ]
    [table] = quality_tables.tables(records)
    assert {row[1]: row[3] for row in table.rows} == {
        "float32": "",
        "mixed_float16": "+0.2000 ± 0.0878, differs",
        "bfloat16": "+0.0000 ± 0.1242",
        "float16, not scaled": "",
        "mixed_bfloat16": "",
    }


@once
def test_the_language_is_that_of_the_standard_library():
    task = next(t for t in quality.TASKS if t.name == "language")
    data = task.data()
    np.testing.assert_array_equal(data.x[:, 1:], data.y[:, :-1])
    assert data.x.max() < 98 and len(np.unique(data.x)) > 80


@once
def test_a_language_model_has_a_head_whose_operands_are_half_precision():
    task = next(t for t in quality.TASKS if t.name == "words")
    data = task.data()
    np.testing.assert_array_equal(data.x[:, 1:], data.y[:, :-1])
    assert np.isin(data.test_x, data.x).mean() > 0.9
    assert np.mean(data.y == 0) < 0.05  # What is none of the frequent words.
    with policy_scope("mixed_float16"):
        model = quality.built(task, "mixed_float16")
    hidden = np.zeros((1, 1), "float16")
    products = [heads.operands_dtype(layer, hidden) for layer in model.layers]
    assert products.count("float16") == 1


@pytest.mark.parametrize("case", ["layer-call", "fit"])
@pytest.mark.slow("It measures; the package does not depend on it.")
def test_a_seam_is_measured_and_put_back(case):
    found = next(seams.measure(case, BACKEND, 0.0, smallest=True))
    assert all(ratio["number"] >= MIN_PAIRS for ratio in found["ratios"].values())
    installing.uninstall()
    assert not hasattr(keras.layers.Layer.__call__, "_keras_mp_original")


@once
@pytest.mark.slow("It measures; the package does not depend on it.")
def test_tracing_and_compiling_is_measured():
    found = next(seams.measure("compile-10", "jax", smallest=True))
    own = {"trace, Keras' own wrapper", "compile, Keras' own wrapper"}
    assert set(found["ratios"]) == {"trace", "compile"} | own


# What is asked for --------------------------------------------------------------------


@once
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suite": "speed"}, "`suite` must be one of cost, seams, kernels, train"),
        ({"cases": ["wide", "narrow"]}, "`case` must be one of wide, variables-200"),
        ({"backends": ["numpy"]}, "`backend` must be one of jax, tensorflow, torch"),
        ({"peers": ["apex"]}, "`peer` must be one of keras_mp, keras, optax"),
        ({"peers": []}, "`peer` must name at least one"),
        (
            {"suite": "seams", "peers": ["keras"]},
            "`peer` must be left out of the suite",
        ),
        ({"suite": "train", "backends": ["tensorflow"]}, "must be one of jax, torch"),
        (
            {"cases": ["cnn"], "backends": ["torch"]},
            "`case` must be one that runs on `backend`",
        ),
    ],
)
def test_an_unknown_name_is_an_error_with_the_known_names(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run.plan(out=str(tmp_path / "out.json"), **options)


@once
@pytest.mark.parametrize("asked", [None, ["numpy"], ["numpy", BACKEND]])
def test_the_command_imports_keras_on_a_backend_that_is_here(asked, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    command._set_backend(asked)
    assert os.environ["KERAS_BACKEND"] in BACKENDS


@once
@pytest.mark.slow("It measures; the package does not depend on it.")
def test_the_command_measures_a_case_and_writes_it(tmp_path):
    def ended(line):
        line = [sys.executable, "-m", "benchmarks", *line.split(), "--out", str(out)]
        options = {"capture_output": True, "text": True, "timeout": 240}
        return subprocess.run(line, cwd=readme.ROOT, **options)

    out = tmp_path / "out.json"
    done = ended("--suite seams --case layer-call --backend jax --seconds 1")
    assert done.returncode == 0, done.stderr
    assert "a layer's call outside jit" in done.stdout
    [record] = results.read(out, "seams")
    assert record["case"] == "layer-call" and record["ratios"]
    wrong = ended("--case narrow")
    assert wrong.returncode == 2
    assert "error: `case` must be one of wide" in wrong.stderr.splitlines()[-1]


@once
def test_pictures_are_drawn():
    figure = cost_tables.plot([a_cost(), a_cost("cnn", control=1.1)])
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels == ["wide, jax", "cnn, jax"]
    records = [
        a_training("mlp", p, examples_per_second={"median": rate}, peak_bytes=None)
        for p, rate in (("tf32", 10), ("mixed_float16", 30))
    ]
    left, right = train_tables.plot(records).axes
    assert left.patches[0].get_width() == 3
    assert "not measured" in right.get_title()
    assert cost_tables.plot([]) is None and train_tables.plot([]) is None
