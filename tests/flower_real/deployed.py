"""Flower's own processes on this machine: a SuperLink, SuperNodes, runs of the app, and their status."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
APP = HERE / "dk-app"
BIN = Path(sys.executable).parent
PATIENCE = 3600.0
"""Time limit in seconds of every wait, generous enough for a slow machine."""


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(found: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Poll a function until it returns a true value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := found():
            return answer
        time.sleep(0.2)
    raise AssertionError(f"{what}: not in {seconds:g} seconds")


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process; Flower's processes have their own process groups."""
    said = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, check=True, encoding="utf-8").stdout
    parents = [tuple(map(int, line.split())) for line in said.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, of in parents if of == parent]
    return found[1:]


class Flower:
    """A SuperLink with its nodes and runs in a temporary folder; a context that ends all processes.

    Args:
        simulation: whether the SuperLink simulates the nodes with Ray.
        link: further arguments of the SuperLink.
        connection: line of `flwr`'s config.toml with the connection; "{folder}" is the folder.
    """

    def __init__(
        self, *, simulation: bool = False, link: tuple[str, ...] = (), connection: str = "insecure = true"
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dk"))  # a short path: Ray's sockets lie below it
        self.port, self._more = free_port(), (*link, *(("--simulation",) if simulation else ()))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {
            **os.environ,
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.folder / "ray"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200",
        }  # fmt: skip
        for name in ("home", "ray"):
            (self.folder / name).mkdir()
        lines = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
        lines += connection.format(folder=self.folder) + "\n"
        (self.folder / "home" / "config.toml").write_text(lines, encoding="utf-8")

    # Processes.

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a process that logs under its name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], env=self.env, cwd=self.folder, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._processes[name] = process
        return process

    def kill(self, name: str) -> None:
        """Kill a process and its descendants with SIGKILL."""
        process = self._processes.pop(name)
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        """Return the log of a process."""
        return (self.folder / f"{name}.log").read_text(errors="replace", encoding="utf-8")

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        secure = () if "--ssl-certfile" in self._more else ("--insecure",)
        self.start(
            "link", "flower-superlink", *secure, "--disable-runtime-dependency-installation", "--host", "127.0.0.1",
            "--port", str(self.port), *self._more,
        )  # fmt: skip

        def listens() -> bool:
            assert self._processes["link"].poll() is None, self.log("link")
            with socket.socket() as tried:
                return tried.connect_ex(("127.0.0.1", self.port)) == 0

        wait_for(listens, "the SuperLink")

    def start_node(
        self, name: str, partition: int, partitions: int, *, config: str = "", secure: tuple[str, ...] = ("--insecure",)
    ) -> None:
        """Start the SuperNode of a partition; `config` is the rest of its node config."""
        which = f"partition-id={partition} num-partitions={partitions} {config}"
        self.start(
            name, "flower-supernode", *secure, "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1",
            "--port", str(free_port()), "--node-config", which,
        )  # fmt: skip

    def start_nodes(self, count: int) -> None:
        """Start a node for each partition, named "node0" and so on."""
        for partition in range(count):
            self.start_node(f"node{partition}", partition, count)

    def __enter__(self) -> Self:
        try:
            self.start_link()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._processes)):
            self.kill(name)
        if os.environ.get("KEEP_FLOWER"):
            print(f"kept: {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def ended(self, name: str) -> bool:
        """Return whether a process has ended by itself."""
        return self._processes[name].poll() is not None

    # Runs.

    def begin(self, name: str, config: Mapping[str, Any], federation: str = "", app: Path = APP) -> str:
        """Start a run of the app that logs under `name`, and return Flower's number of the run."""
        said = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        place = ("--federation-config", federation) if federation else ()
        process = self.start(name, "flwr", "run", str(app), "here", "--stream", "-c", said, *place)

        def number() -> str | None:
            found = re.search(r"started run (\d+)", self.log(name))
            assert found or process.poll() is None, self.log(name)
            return found and found[1]

        return wait_for(number, "a run")

    def end(self, name: str, number: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait for the end of a run, and return its status in Flower (the exit status of `flwr run` is always 0)."""
        self._processes.pop(name).wait(seconds)
        return self.status(number)

    def status(self, number: str) -> dict[str, Any]:
        """Return Flower's entry of a run."""
        said = self.ask("list", "here", "--format", "json")
        (run,) = (run for run in json.loads(said[said.index("{") :])["runs"] if run["run-id"] == number)
        return run

    def nodes(self) -> list[dict[str, Any]]:
        """Return Flower's list of nodes."""
        said = self.ask("supernode", "list", "here", "--format", "json")
        return json.loads(said[said.index("{") :])["nodes"]

    def ask(self, *command: str) -> str:
        """Return the output of a `flwr` command."""
        done = subprocess.run(
            [str(BIN / "flwr"), *command], env=self.env, cwd=self.folder, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=PATIENCE, check=False,
            encoding="utf-8",
        )  # fmt: skip
        return done.stdout

    def results(self, out: Path) -> dict[str, dict[str, Any]]:
        """Return the app's result lines, by method."""
        path = out / "results.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return {line["method"]: line for line in map(json.loads, lines)}
