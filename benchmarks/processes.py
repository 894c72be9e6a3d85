"""Each measurement in a process of its own, whose memory and caches go with it.

Keras reads KERAS_BACKEND once, when it is imported; and what frameworks keep of one
measurement must not be there in the next.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.results import Record

_ROOT = pathlib.Path(__file__).parents[2]
# Where processes can be pinned they can also be stopped, and go on.
CAN_PIN = hasattr(os, "sched_setaffinity")
# By where in the heap the buffers of a step lie, glibc hands them back at its end, and
# their pages are mapped anew in the next: a quarter of a step of `fit`, or nothing, of
# two that are alike. Where time is measured it keeps what it has.
_KEEPING_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # The largest that it takes.
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
# Before the frameworks are imported, which count the cores that they may use.
_PROGRAM = """
import json, os, sys
job = json.loads(sys.argv[1])
if job["core"] is not None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[job["core"] % len(cores)]})
from benchmarks import worker
worker.main(job)
"""


class Job(NamedTuple):
    """What one process measures.

    Attributes:
        suite: the name of the suite, and of its module.
        about: what tells its records from others; "backend" is among it.
        options: the other arguments of the suite's `measure`.
        limit: after so many seconds it is ended.
        ahead: whether to start it while the one before is under way, so that imports,
            and what else comes before `ready`, take less time.
        pinned: whether to one core, while nothing else of ours runs; where the system
            knows that.
        environment: variables of it.
    """

    suite: str
    about: dict[str, Any]
    options: dict[str, Any]
    limit: float
    ahead: bool = False
    pinned: bool = False
    environment: dict[str, str] = {}  # noqa: RUF012

    @property
    def title(self) -> str:
        """What the progress bar says."""
        return " ".join(str(x) for x in self.about.values())


class Process:
    """A job under way.

    Args:
        job: what it measures. It is started at once, and waits when it is ready until
            its records are asked for: meanwhile something else can be measured.
        core: on which it runs, if it is pinned, counted round those that there are.
    """

    def __init__(self, job: Job, core: int = 0) -> None:
        self.job = job
        self._errors = tempfile.TemporaryFile(mode="w+")
        self._late = False
        told = {"suite": job.suite, "about": job.about, "options": job.options}
        path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM,
             json.dumps({**told, "core": core if job.pinned and CAN_PIN else None})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # A group of its own, to stop what it has started too.
            process_group=0 if CAN_PIN else None,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                **(_KEEPING_MEMORY if job.pinned else {}),
                **job.environment,
                "KERAS_BACKEND": job.about["backend"],
                "PYTHONPATH": os.pathsep.join(path),
            },
        )  # fmt: skip

    def records(
        self,
        limit: float,
        add: Callable[[Record], object],
        tell: Callable[[float], object],
        following: "Process | None" = None,
    ) -> str:
        """Lets it go when it is ready, and waits for its end.

        Args:
            limit: after so many seconds it is ended.
            add: is given each record as it comes.
            tell: is told how much is done, from 0 to 1.
            following: stands still from when it is ready to its end, if it is pinned.

        Returns:
            What went wrong, in a line; or nothing.
        """
        timer = threading.Timer(limit, self._end_late)
        timer.start()
        try:
            assert self._process.stdout
            for line in self._process.stdout:
                kind, _, rest = line.partition(" ")
                if kind == "ready":
                    if following and self.job.pinned:
                        following.stop()
                    self._let_go()
                elif kind == "record":
                    add({**self.job.about, **json.loads(rest)})
                elif kind == "part":
                    tell(float(rest))
            code = self._process.wait()
        finally:
            timer.cancel()
            self.end()
            if following and self.job.pinned:
                following.go_on()
        if self._late:
            return f"took longer than {limit:.0f} s"
        return "" if code == 0 else f"{self._last_words()} (exit status {code})"

    def end(self) -> None:
        """Ends it, if it has not ended."""
        if self._process.poll() is None:
            if CAN_PIN:
                self._signal(signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Has it stand still, where the system knows that."""
        if CAN_PIN:
            self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Takes `stop` back."""
        if CAN_PIN:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # It has just ended.
                os.killpg(self._process.pid, number)

    def _let_go(self) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except OSError:
            pass  # It has ended already, and says later why.

    def _end_late(self) -> None:
        self._late = True
        self.end()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1][:300] if lines else "ended without a word"
