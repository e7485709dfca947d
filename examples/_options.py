"""Shared parts of the examples: the command line, and the execution of a study with tables, curves and pictures."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from _data import refuse_unused, require_data, root_or_pictures
from _files import read_accuracies, write_file
from distillkit.study import Record, Records, Study, curves, pictures, sparkline, tuning_table

__all__ = ["command_line", "number", "parse_arguments", "run_study"]


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows defaults and keeps the description's line breaks."""


def number(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `least`."""

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
    workers: str = "runs at a time, each in its own process",
    pictures: bool = False,
) -> argparse.ArgumentParser:
    """Return a parser with the common options. An example adds its own options, and then calls `parse_arguments`.

    Args:
        description: text that `--help` shows first.
        out: default folder of the results, to which `-<preset>` is appended.
        presets: choices of `--preset`; "cpu" is the default.
        workers: description of what `--workers` counts.
        pictures: whether `--data` may also name folders of the user's own pictures; see `_data.own_task`.
    """
    again = "An interrupted call continues where it stopped; finished runs are not repeated."
    parser = argparse.ArgumentParser(description=description, epilog=again, formatter_class=_Help)
    add = parser.add_argument
    add("--preset", choices=tuple(presets), default="cpu", help="how much to compute")
    add("--seeds", type=int, nargs="+", default=None, metavar="S", help="seeds; default: the preset's")
    add("--out", type=Path, default=None, help=f"folder of the results; default: {out}-<preset>")
    add("--workers", type=number(1), default=max(1, os.cpu_count() or 1), help=workers)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    root = "root of the datasets by name; default: $DISTILLKIT_DATA"
    own = f"{root}; or your own pictures: one folder (class/picture.png) or .npz to split, or one per client"
    add("--data", type=Path, nargs="+" if pictures else None, metavar="PATH", help=own if pictures else root)
    if pictures:
        add("--size", type=number(8), default=32, help="height and width of your own pictures after resizing")
    add("--estimate", action="store_true", help="only estimate the cost: seconds, bytes, memory")
    parser.set_defaults(default_out=out, pictures=[] if pictures else None)
    return parser


def parse_arguments(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a list of words (default: the command line), and resolve the output folder, the device and `--data`.

    In the result, `data` is the root of named datasets, or None; `pictures` lists the user's own folders and files.
    """
    found = parser.parse_args(words)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters such as those of the sparklines
    if isinstance(found.data, list):
        try:
            found.data, found.pictures = root_or_pictures(found.data)
        except FileNotFoundError as error:
            parser.error(f"argument --data: {error}")
    refuse_unused(parser, words, "without pictures of your own in --data", *["--size"] * (found.pictures == []))
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
    """Run a study as the command line asks, write its tables, curves and pictures, and print the tables.

    Args:
        study: the study to run.
        arguments: result of `parse_arguments`.
        tables: function of the records that returns the contents of `table.md`: tables and sentences. The searched
            configurations are added below them.
        by: horizontal axes of the curves, see `distillkit.study.curves`; empty for candidates without rounds.
        sets: images per class in a picture of the sets that the candidates made; 0 for no picture.
        claim: the hypothesis and its test, printed before the runs and below the tables.
        ends: whether the script exits after `--estimate`. Pass False if another study follows.
        also: runs of another study that tables and curves include.

    Returns:
        The records of the study; empty after an estimate. If the data cannot be read, the script exits.
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

    def show(line: Mapping[str, Any]) -> None:
        accuracies = read_accuracies(study.out / line["run"])
        last = "–" if line["accuracy_last"] is None else f"{100 * line['accuracy_last']:.1f} %"
        after = f" after round {line['rounds']}" if accuracies else ""
        said = f"{line['task']}, seed {line['seed']}, {line['method']}".ljust(40)
        print(f"{said} {sparkline(accuracies) + ' ' if accuracies else ''}{last}{after}", flush=True)

    print(f"{study!r}; for each run, as soon as it is done, accuracy by round (a full block is 100 %):", flush=True)
    searched = study.num_configurations > 1
    records = study.run(processes=arguments.workers, device=arguments.device, trial=searched, on_run=show)
    shown = Records(also) + records
    parts = [*tables(shown), *([claim] if claim else []), *([tuning_table(study.out)] if searched else [])]
    text = "\n\n".join(map(str, parts))
    write_file(study.out / "table.md", f"{text}\n")
    for cost in by:
        curves(shown, by=cost).savefig(study.out / f"accuracy_by_{cost}.png", dpi=150)
    if sets:
        pictures(records, per_class=sets).savefig(study.out / "sets.png", dpi=150)
    print(f"\n{text}\n\nWritten to {study.out} in {time.perf_counter() - began:.0f} s.", flush=True)
    return records
