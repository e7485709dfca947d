"""Execution of an example's study, with tables, curves and pictures."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from distillkit.study import Record, Records, Study, curves, pictures, tuning_table
from shared.data import require_data
from shared.files import write_file
from shared.repeat import repeat_run

UNFINISHED = 3
"""Exit status of a script that `--seconds` stopped."""


def run_study(
    study: Study,
    arguments: argparse.Namespace,
    tables: Callable[[Records], Sequence[object]],
    *,
    by: Sequence[str] = ("round",),
    main: Collection[str] | None = None,
    sets: int = 0,
    claim: str | None = None,
    ends: bool = True,
    also: Sequence[Record] = (),
) -> Records:
    """Run a study with the options of the command line, write its tables, curves and pictures, and print the tables.

    Args:
        study: the study to run.
        arguments: result of `parse_arguments`.
        tables: function of the records that returns the contents of `table.md`: tables and sentences. The searched
            configurations are added below them.
        by: horizontal axes of the curves, see `distillkit.study.curves`; empty for candidates without rounds.
        main: names of the candidates that the curves show; None for all.
        sets: images per class in a picture of the sets that the candidates made; 0 for no picture.
        claim: the hypothesis and its test, printed before the runs and below the tables.
        ends: whether the script exits after `--estimate`. Pass False if another study follows.
        also: runs of another study that tables and curves include.

    Returns:
        The records of the study; empty after an estimate. The script exits if the data cannot be read, after
        `--repeat`, and with the status `UNFINISHED` after `--seconds`.
    """
    require_data([*study.design.tasks.values(), *study.design.tuned_tasks.values()])
    if arguments.estimate:
        print(study.estimate(device=arguments.device), flush=True)
        if ends:
            raise SystemExit
        return Records([])
    if arguments.repeat:
        raise SystemExit(repeat_run(study, *arguments.repeat, device=arguments.device))
    if claim:
        print(claim, end="\n\n", flush=True)
    began = time.perf_counter()

    def show(line: Mapping[str, Any]) -> None:
        last = "–" if line["accuracy_last"] is None else f"{100 * line['accuracy_last']:.1f} %"
        after = f" after round {line['rounds']}" if line["rounds"] else ""
        print(f"{line['task']}, seed {line['seed']}, {line['method']}".ljust(40), f"{last}{after}", flush=True)

    print(f"{study!r}; the accuracy of each run, as soon as it is done:", flush=True)
    searched = study.num_configurations > 1
    how: dict[str, Any] = {"processes": arguments.workers, "device": arguments.device, "seconds": arguments.seconds}
    records = study.run(**how, trial=searched and arguments.seconds is None, on_run=show)
    wanted = {(spec.task, spec.method, spec.seed) for spec in study.design.final_runs({})}
    if unfinished := len(wanted - {(record.task, record.method, record.seed) for record in records}):
        print(f"Stopped; {unfinished} of {len(wanted)} runs are not finished. The same call continues.", flush=True)
        raise SystemExit(UNFINISHED)
    shown = Records(also) + records
    parts = [*tables(shown), *([claim] if claim else []), *([tuning_table(study.out)] if searched else [])]
    text = "\n\n".join(map(str, parts))
    write_file(study.out / "table.md", f"{text}\n")
    drawn = [record for record in shown if main is None or record.method in main]
    for cost in by:
        curves(drawn, by=cost).savefig(study.out / f"accuracy_by_{cost}.png", dpi=150)
    if sets:
        pictures(records, per_class=sets).savefig(study.out / "sets.png", dpi=150)
    print(f"\n{text}\n\nWritten to {study.out} in {time.perf_counter() - began:.0f} s.", flush=True)
    return records
