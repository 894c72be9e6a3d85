"""Each measurement has a process of its own, whose memory and caches end with it.

Keras reads KERAS_BACKEND once, when it is imported; and what a framework keeps of one
measurement must not change the next.
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

_ROOT = pathlib.Path(__file__).parents[1]
# Where the system can pin a process it can also stop one and let it go on.
CAN_PIN = hasattr(os, "sched_setaffinity")
# Depending on where a step's buffers lie in the heap, glibc may give them back at its
# end and map their pages again in the next. For two equal programs this cost a quarter
# of a step of `fit`, or nothing. So glibc keeps its memory while we time.
_KEEPING_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the largest that it takes
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
# Pinned before it imports the frameworks, which count the cores that they may use.
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
        suite: the name of the suite.
        about: what tells its records from others; "backend" is part of it.
        options: the other arguments of the suite's `measure`.
        limit: the process ends after this many seconds.
        ahead: whether it starts while the one before runs: then imports, and everything
            else before `ready`, are done when its turn comes.
        pinned: whether it has one core, while nothing else of ours runs, on systems
            that can do that.
        environment: variables for the process.
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
        """The text beside the progress bar."""
        return " ".join(str(x) for x in self.about.values())


class Process:
    """A job that runs.

    Args:
        job: what it measures. It starts at once; when it is ready, it waits for
            `records`, so that another one can be measured first.
        core: the core for a pinned process, modulo the number of cores.
    """

    def __init__(self, job: Job, core: int = 0) -> None:
        self.job = job
        self._errors = tempfile.TemporaryFile(mode="w+")
        self._late = False
        message = {
            "suite": job.suite,
            "about": job.about,
            "options": job.options,
            "core": core if job.pinned and CAN_PIN else None,
        }
        path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, json.dumps(message)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # A group of its own: stopping it stops what it has started, too.
            process_group=0 if CAN_PIN else None,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                **(_KEEPING_MEMORY if job.pinned else {}),
                **job.environment,
                "KERAS_BACKEND": job.about["backend"],
                "PYTHONPATH": os.pathsep.join(path),
            },
        )

    def records(
        self,
        limit: float,
        add: Callable[[Record], object],
        progress: Callable[[float], object],
        following: "Process | None" = None,
    ) -> str:
        """Lets it measure when it is ready, and waits for its end.

        Args:
            limit: it ends after this many seconds.
            add: takes each record as soon as it is there.
            progress: takes the share that is done, from 0 to 1.
            following: a process that stops while this one measures, if this is pinned.

        Returns:
            One line about what went wrong; empty if nothing did.
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
                    self._continue()
                elif kind == "record":
                    add({**self.job.about, **json.loads(rest)})
                elif kind == "part":
                    progress(float(rest))
            code = self._process.wait()
        finally:
            timer.cancel()
            self.end()
            if following and self.job.pinned:
                following.go_on()
        if self._late:
            return f"took longer than {limit:.0f} s"
        return "" if code == 0 else f"{self._last_error()} (exit status {code})"

    def end(self) -> None:
        """Ends it, if it still runs."""
        if self._process.poll() is None:
            if CAN_PIN:
                self._signal(signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Stops it until `go_on`, where the system can."""
        if CAN_PIN:
            self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undoes `stop`."""
        if CAN_PIN:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # It has just ended.
                os.killpg(self._process.pid, number)

    def _continue(self) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except OSError:
            pass  # It has ended already; its exit status says so.

    def _end_late(self) -> None:
        self._late = True
        self.end()

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1][:300] if lines else "ended without an error message"
