"""Strong membership attacks on models of raw data, distilled sets, federated runs and private runs.

    python examples/membership/run.py --estimate             # times one run of each pipeline
    python examples/membership/run.py --rows raw dm          # some rows; a later call adds rows or shadows
    python examples/membership/run.py --rows transcript      # records visible in the messages of the quickstart's FedDM

Every pipeline runs, from the records to the published result, on random halves of the digits. Each run is attacked
once, with thresholds and shadow models from the other runs. The tables show all attacks with simultaneous intervals,
and not only the best attack. docs/results/attacks.md is generated from `records.jsonl`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of all examples

from attacks.membership import estimate_cost, run_shadows
from distillkit.study import git_commit, worker_pool
from membership.pipelines import NUMBERS, ROWS, pipeline
from membership.results import Line, result_lines
from membership.tables import TABLES, table
from membership.transcript import demo
from shared.files import write_file
from shared.options import command_line, number, parse_arguments, refuse_unused

PRESETS: dict[str, dict[str, Any]] = {"smoke": {"shadows": 8}, "cpu": {"seeds": [0], "shadows": 66}}
TRANSCRIPT = "transcript"


def written(path: Path) -> list[Line]:
    """Read the records in a file."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, lines: Sequence[Line]) -> None:
    """Write records atomically, one per line."""
    write_file(path, "".join(json.dumps(line) + "\n" for line in lines))


def cost(folder: Path, row: str, preset: str, count: int, seed: int) -> float:
    """Return the CPU seconds of one run of a row's pipeline. The run is timed once, and the result is stored."""
    path = folder / "cost.json"
    if not path.exists():
        began, fresh = time.process_time(), not any(folder.glob("shadow-*"))
        estimate_cost(pipeline(row, preset), count, seed=seed, out=folder if fresh else None)
        write(path, [{"cpu_seconds": time.process_time() - began}])
    return float(written(path)[0]["cpu_seconds"])


def run(row: str, o: Any, seed: int, facts: Line) -> list[Line]:
    """Return the records of one row, after executing its missing runs."""
    folder, numbers = o.out / row, NUMBERS[o.preset]
    kept = folder / "records.jsonl"
    if kept.exists() and (row == TRANSCRIPT or written(kept)[0]["shadows"] == o.shadows):
        return written(kept)
    if row == TRANSCRIPT:
        lines = [{"row": row, "kind": TRANSCRIPT, **demo(o.preset, seed), **facts}]
    else:
        facts |= {"cpu_seconds": cost(folder, row, o.preset, o.shadows, seed), "shadows": o.shadows}
        with nullcontext() if o.workers == 1 else worker_pool(o.workers) as pool:
            found = run_shadows(pipeline(row, o.preset), o.shadows, out=folder, seed=seed, executor=pool)
        lines = result_lines(row, found, {**facts, "numbers": numbers})
    write(kept, lines)
    return lines


def main(words: Sequence[str] | None = None) -> None:
    """Run the example."""
    every, at_once = (*ROWS, TRANSCRIPT), "runs at a time"
    parser = command_line(__doc__, out="runs/membership", presets=PRESETS, workers=at_once, data=False, study=False)
    parser.add_argument("--rows", nargs="+", choices=every, default=every, help="pipelines to attack")
    parser.add_argument("--shadows", type=number(8), default=None, help="even number of runs; default: the preset's")
    parser.set_defaults(device="cpu")
    o = parse_arguments(parser, words)
    if o.device != "cpu":
        parser.error("--device must be cpu: these networks are too small to benefit from a GPU")
    if len(o.seeds) > 1:
        parser.error("--seeds takes one seed here: use more --shadows instead of more seeds")
    [seed] = o.seeds
    if o.shadows % 2:
        parser.error(f"--shadows must be even because they come in pairs of complements, got {o.shadows}")
    refuse_unused(parser, words, f"with --rows {TRANSCRIPT} alone", "--shadows", unless={*o.rows} - {TRANSCRIPT})
    torch.set_num_threads(1)
    if o.estimate:
        each = {row: cost(o.out / row, row, o.preset, o.shadows, seed) for row in o.rows if row != TRANSCRIPT}
        print("\n".join(f"{row}: {seconds:.3g} CPU s per run" for row, seconds in each.items()))
        print(f"all: {sum(each.values()) * o.shadows / 60:.0f} CPU minutes for {o.shadows} runs of each")
        raise SystemExit
    for row in o.rows:
        command = (
            f"python examples/membership/run.py --preset {o.preset} --seeds {seed} --shadows {o.shadows} --rows {row}"
        )
        run(row, o, seed, {"commit": git_commit(), "command": command, "seed": seed, "preset": o.preset})
        there = [o.out / name / "records.jsonl" for name in every]
        lines = [line for path in there if path.exists() for line in written(path)]
        write(o.out / "records.jsonl", lines)
        text = "\n\n".join(made for name in TABLES if (made := table(name, lines)))
        write_file(o.out / "table.md", f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
