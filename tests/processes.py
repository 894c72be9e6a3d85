"""Runs a script of this folder in processes of their own, which find each other."""

import json
import os
import pathlib
import socket
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent
# A process that waits for another one for ever is a failing test, not a hanging one.
TIMEOUT = 240


def run(script, *args, processes=1, **environment):
    """Returns what each of the processes printed last, as JSON.

    They get the environment variables of `torchrun`: RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "PYTHONWARNINGS": "",
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **environment,
    }
    started = [
        subprocess.Popen(
            [sys.executable, TESTS / script, *args],
            env=shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def on_four_devices(script):
    """What a script prints last where JAX finds four devices, as JSON."""
    flags = os.environ.get("XLA_FLAGS", "")
    more = "--xla_force_host_platform_device_count=4"
    (found,) = run(script, XLA_FLAGS=f"{flags} {more}")
    return found
