"""What the examples share: the command line, and a study run with its tables, curves and pictures written."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from _data import refuse_unread, require_data, root_or_pictures
from distillkit._utils.files import write_atomically
from distillkit.study import Record, Records, Study, curves, pictures, sparkline, tuning_table

__all__ = ["command_line", "number", "parsed", "run_study"]


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and a description in the lines that it is written in."""


def number(least: int) -> Callable[[str], int]:
    """A type for argparse: an integer that is at least `least`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return integer


def command_line(
    description: str | None,
    *,
    out: str,
    presets: Sequence[str] = ("smoke", "cpu", "paper"),
    workers: str = "runs at a time, each in a process of its own",
    pictures: bool = False,
) -> argparse.ArgumentParser:
    """A parser with the common options, to which an example adds its own; `parsed` reads the words.

    Args:
        description: what `--help` says first.
        out: the folder of the results, to which `-<preset>` is appended by default.
        presets: the first words of `--preset`'s choices; "cpu" is the default.
        workers: what `--workers` counts.
        pictures: whether `--data` may name folders of the user's own pictures too, see `_data.own_task`.
    """
    again = "Started again, it goes on where it was, whatever ended it; what is finished is not run again."
    parser = argparse.ArgumentParser(description=description, epilog=again, formatter_class=_Help)
    add = parser.add_argument
    add("--preset", choices=tuple(presets), default="cpu", help="how much to compute")
    add("--seeds", type=int, nargs="+", default=None, metavar="S", help="seeds; default: the preset's")
    add("--out", type=Path, default=None, help=f"folder of the results; default: {out}-<preset>")
    add("--workers", type=number(1), default=max(1, os.cpu_count() or 1), help=workers)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    root = "root of the datasets by name; default: $DISTILLKIT_DATA"
    own = f"{root}; or your own pictures: one folder (class/picture.png) or .npz to deal out, or one for each client"
    add("--data", type=Path, nargs="+" if pictures else None, metavar="PATH", help=own if pictures else root)
    if pictures:
        add("--size", type=number(8), default=32, help="height and width that your own pictures are resized to")
    add("--estimate", action="store_true", help="only say what it will take: seconds, bytes, memory")
    parser.set_defaults(default_out=out, pictures=[] if pictures else None)
    return parser


def parsed(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """What the words say (default: those of the command line), with the folder and the device that they mean.

    `data` is the root of the datasets by name, or None; `pictures` lists the user's own folders and files, if it may.
    """
    found = parser.parse_args(words)
    if isinstance(found.data, list):
        try:
            found.data, found.pictures = root_or_pictures(found.data)
        except FileNotFoundError as error:
            parser.error(f"argument --data: {error}")
    refuse_unread(parser, words, "without pictures of your own in --data", *["--size"] * (found.pictures == []))
    found.out = found.out or Path(f"{found.default_out}-{found.preset}")
    del found.default_out
    if found.device == "auto":
        found.device = "cuda" if torch.cuda.is_available() else "cpu"
    return found


def run_study(
    study: Study,
    arguments: argparse.Namespace,
    tables: Callable[[Records], Sequence[object]],
    *,
    by: Sequence[str] = ("round",),
    sets: int = 0,
    claim: str | None = None,
    ends: bool = True,
    also: Sequence[Record] = (),
) -> Records:
    """Run a study as the command line says; write its tables, curves and pictures into its folder and print the tables.

    Args:
        study: what to run.
        arguments: as `parsed` gives them.
        tables: makes of the records what `table.md` says, tables and sentences; below it stand the tries.
        by: what curves are drawn over, see `distillkit.study.curves`; none for ways without rounds.
        sets: images a class of a picture of the sets that the ways made; 0 for no picture.
        claim: what the table is to test and how, said before the runs and below the table.
        ends: whether `--estimate` ends the script here; False where another study follows.
        also: runs of another study that tables and curves show too.

    Returns:
        The records of the study; none after an estimate. Data that cannot be read end the script.
    """
    require_data([*study.design.tasks.values(), *study.design.tuned_tasks.values()])
    if arguments.estimate:
        print(study.estimate(device=arguments.device), flush=True)
        if ends:
            raise SystemExit
        return Records([])
    if claim:
        print(claim, end="\n\n", flush=True)
    began = time.perf_counter()

    def told(line: Mapping[str, Any]) -> None:
        path = study.out / line["run"] / "history.jsonl"
        rows = [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []
        accuracies = [row["accuracy"] for row in rows if row.get("accuracy") is not None]
        last = "–" if line["accuracy_last"] is None else f"{100 * line['accuracy_last']:.1f} %"
        after = f" after round {line['rounds']}" if accuracies else ""
        said = f"{line['task']}, seed {line['seed']}, {line['method']}".ljust(40)
        print(f"{said} {sparkline(accuracies) + ' ' if accuracies else ''}{last}{after}", flush=True)

    print(f"{study!r}; for each run, as soon as it is done, accuracy by round (a full block is 100 %):", flush=True)
    records = study.run(
        processes=arguments.workers, device=arguments.device, trial=study.num_configurations > 1, on_run=told
    )
    shown = Records(also) + records
    parts = [
        *tables(shown),
        *([claim] if claim else []),
        *([tuning_table(study.out)] if study.num_configurations > 1 else []),
    ]
    text = "\n\n".join(map(str, parts))
    write_atomically(study.out / "table.md", f"{text}\n")
    for cost in by:
        curves(shown, by=cost).savefig(study.out / f"accuracy_by_{cost}.png", dpi=150)
    if sets:
        pictures(records, per_class=sets).savefig(study.out / "sets.png", dpi=150)
    print(f"\n{text}\n\nWritten to {study.out} in {time.perf_counter() - began:.0f} s.", flush=True)
    return records
