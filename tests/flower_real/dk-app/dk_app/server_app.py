"""Server app, which runs one method after the other and writes a result line for each."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from flwr.serverapp import ServerApp

from dk_app.costs import costs
from dk_app.settings import SETTINGS, Marked, method_of, test_set
from fl.deploy.flower import ConnectionOptions, serve
from fl.study import outcome_hash

app = ServerApp()


@app.main()
def main(grid: Any, context: Any) -> None:
    """Run the methods of the run config; the reply timeout is 1.5 times the slowest round so far plus 10 s."""
    config, slowest = context.run_config, 0.0
    out, names, settings = Path(config["out"]), config["methods"].split(), config["setting"].split()
    out.mkdir(parents=True, exist_ok=True)
    (out / "server.pid").write_text(str(os.getpid()), encoding="utf-8")
    if names == ["costs"]:
        for line in costs(grid, lambda name: Marked(grid, name), config["payloads"].split(",")):
            write(out, line)
        return
    for name, setting in zip(names, settings * len(names)):
        began = time.perf_counter()
        timeout = 1.5 * slowest + 10 if slowest else 900.0
        method, folder = method_of(name, out, node=False), out / "runs" / name
        run = serve(
            Marked(grid, name), method, test=test_set(), out=folder, resume=True,
            connection=ConnectionOptions(
                poll_interval=1.0, reply_timeout=timeout, connect_timeout=config["connect-timeout"],
                max_concurrent=config["max-concurrent"],
            ), **SETTINGS[setting],
        )  # fmt: skip
        slowest = max(slowest, *(row["seconds"] for row in run.rows))
        line = {
            "method": name, "hash": outcome_hash(run), "accuracy": run.accuracy_last,
            "failed": [row["failed"] for row in run.rows], "round_seconds": [row["seconds"] for row in run.rows],
            "epsilon": [row.get("epsilon") for row in run.rows], "seconds": time.perf_counter() - began,
            "secure_sum": [row.get("secure_sum") for row in run.rows], "distillkit": fl_file(),
        }  # fmt: skip
        write(out, line)


def write(out: Path, line: dict[str, Any]) -> None:
    """Append a result line."""
    with (out / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def fl_file() -> str:
    """Return the folder from which `fl` was imported."""
    import fl

    return str(Path(fl.__file__).parent)
