"""Repetition of one recorded run of an example, and its comparison with the record round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distillkit.study import Record, Study, git_commit, read_records


def repeat_run(study: Study, records: str, run: str, *, device: str) -> int:
    """Repeat a recorded run with its settings, print how it compares, and return 1 if it differs, otherwise 0.

    The run's own folder is in `repeat` in the study's folder. Its name contains the commit, so an interrupted
    repetition continues, and other code begins anew. If several recorded runs have the same name, the one on a task of
    the study is repeated. Another processor or version of PyTorch rounds differently, and may therefore give other
    numbers.

    Args:
        study: study of the example, with the run's task and candidate.
        records: records with the run: a study's folder, or a file such as `docs/results/vhl.jsonl`.
        run: name of the run in these records.
        device: the device to compute on.

    Raises:
        SystemExit: the records lack the run, or the study lacks its task or candidate.
    """
    recorded = read_records(records)
    named = [record for record in recorded if record.line.get("run") == run]
    if not named:
        names = list(dict.fromkeys(str(record.line.get("run")) for record in recorded))
        raise SystemExit(f"--repeat: {records} has no run {run!r}; it has {_listed(names)}")
    old = next((record for record in named if record.task in study.design.tasks), named[0])
    for kind, name, known in (
        ("task", old.task, study.design.tasks), ("method", old.method, study.design.candidates),
    ):  # fmt: skip
        if name not in known:
            raise SystemExit(f"--repeat: these options give no {kind} {name!r}, only {_listed(list(known))}")
    candidate = replace(study.design.candidates[old.method], search=[old.last("settings") or {}], like=None)
    task = study.design.tasks[old.task]
    folder = study.out / "repeat" / f"{run}-{git_commit()}"
    again = Study(folder, task, {old.method: candidate}, seeds=[old.seed], tune_seeds=[old.seed + 1])
    print(f"Repeating {run} of {records}, recorded at commit {old.line.get('commit')}.", flush=True)
    [new] = again.run(device=device, trial=False)
    if difference := _difference(old, new):
        print(f"Differs from the record: {difference} (this is commit {git_commit()}).")
    else:
        print(f"Same as the record: {_accuracy(new)}, with the same accuracy after each of {len(new.rows)} rounds.")
    return int(difference is not None)


def _difference(old: Record, new: Record) -> str | None:
    """Return the first difference between two runs, or None if all accuracies are equal."""
    for row, other in zip(old.rows, new.rows, strict=False):
        if row.get("accuracy") != other.get("accuracy"):
            return f"{other.get('accuracy')} instead of {row.get('accuracy')} after round {row.get('round')}"
    if len(old.rows) != len(new.rows):
        return f"{len(new.rows)} instead of {len(old.rows)} rounds"
    if old.line["accuracy_last"] != new.line["accuracy_last"]:
        return f"{_accuracy(new)} instead of {_accuracy(old)}"
    return None


def _accuracy(record: Record) -> str:
    """Return the last accuracy in per cent."""
    last = record.line["accuracy_last"]
    return "no accuracy" if last is None else f"{100 * last:.2f} %"


def _listed(names: Sequence[str]) -> str:
    """Return names for an error message."""
    return ", ".join(map(repr, names)) or "none"
