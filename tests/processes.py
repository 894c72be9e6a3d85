"""Runs a script of this folder in processes of their own, which find each other."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

TESTS = pathlib.Path(__file__).parent
# A process that waits for another one for ever is a failing test, not a hanging one.
TIMEOUT = 240


@contextlib.contextmanager
def kept_ports(count):
    """Ports that nobody else is given for as long as this lasts.

    The sockets here do not listen, and so a server may bind their ports as well, with
    SO_REUSEADDR or SO_REUSEPORT, which those of JAX and TensorFlow set.
    """
    with contextlib.ExitStack() as open_sockets:
        ports = []
        for _ in range(count):
            kept = open_sockets.enter_context(socket.socket())
            for reuse in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                kept.setsockopt(socket.SOL_SOCKET, reuse, 1)
            kept.bind(("127.0.0.1", 0))
            ports.append(kept.getsockname()[1])
        yield ports


def run(script, *args, processes=1, **environment):
    """Returns what each of the processes printed last, as JSON.

    They get the environment variables RANK and WORLD_SIZE, and two ways to find each
    other: PORTS, one each for a server of gRPC, and MEETING, the URL of a file that
    torch's processes meet in.
    """
    with (
        kept_ports(processes) as ports,
        tempfile.TemporaryDirectory() as folder,
    ):
        shared = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
            "PYTHONWARNINGS": "",
            "WORLD_SIZE": str(processes),
            "PORTS": " ".join(map(str, ports)),
            "MEETING": f"file://{folder}/meeting",
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
                process.wait()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def on_four_devices(script):
    """What a script prints last where JAX finds four devices, as JSON."""
    flags = os.environ.get("XLA_FLAGS", "")
    more = "--xla_force_host_platform_device_count=4"
    (found,) = run(script, XLA_FLAGS=f"{flags} {more}")
    return found
