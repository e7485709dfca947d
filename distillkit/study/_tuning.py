"""Choice of the best configuration of each candidate of a study, and the table of these choices.

A configuration consists of values of a candidate's settings. The file `choice.json` records the choices.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit._utils.plain_values import plain_values
from distillkit._utils.tables import NONE, Table
from distillkit.study._design import StudyDesign
from distillkit.study._guarantee import EXACT
from distillkit.study._records import Records, choices_in, read_json, read_record, write_json
from distillkit.study.candidate import RULES
from distillkit.study.history import RecordError


@dataclass(frozen=True)
class TuningResult:
    """Search result of one candidate on one task.

    Attributes:
        task: name of the task of the tuning runs.
        method: name of the candidate.
        configurations: one mapping per configuration, with its `settings`, its `scores` (one per tuning seed) and its
            `score` (their mean; None if a run failed). Empty for a candidate with one configuration or with `like`.
        chosen: index of the chosen configuration; None for a candidate with `like`.
        like: name of the candidate whose chosen settings are used instead of a search; None for a candidate with its
            own search.
        rule: rule by which the configuration was chosen; None if nothing was chosen.
    """

    task: str
    method: str
    configurations: tuple[Mapping[str, Any], ...]
    chosen: int | None
    like: str | None
    rule: str | None = None


def choose(
    out: Path, design: StudyDesign, rule: str, late_rounds: int | None
) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Choose the best configurations from the tuning runs in a study's folder, and write `choice.json`.

    If the candidate is private, `not_private` says that its scores are not covered by epsilon.

    Returns:
        The chosen settings, by task and candidate.

    Raises:
        ValueError: no configuration of a candidate has a score, because every configuration has a tuning run that
            failed or has no validation accuracy.
    """

    def summary(folder: Path, own: str) -> Mapping[str, Any]:
        path = folder / "summary.json"
        return Records([read_record(path)]).late(late_rounds)[0].line if own == "late" else read_json(path)

    chosen: dict[tuple[str, str], Mapping[str, Any]] = {}
    path = out / "choice.json"
    content = read_json(path)["tasks"] if path.exists() else {}
    for task in design.tuned_tasks:
        found: dict[str, Any] = content.setdefault(task, {})
        for method, candidate in design.candidates.items():
            if design.has(task, method):
                found[method] = {"search": [], "chosen": None if candidate.like else 0, "like": candidate.like}
    for (task, method), runs in design.tuning_runs().items():
        own = design.candidates[method].rule or rule
        search = [score_configuration([summary(out / spec.folder, own) for spec in one], own) for one in runs]
        best = best_configuration(search, f"candidates[{method!r}] on {task}")
        chosen[task, method] = runs[best][0].settings
        charged = any((out / spec.folder / "ledger.jsonl").exists() for one in runs for spec in one)
        private = {"not_private": EXACT} if charged else {}
        content[task][method] = {"search": search, "chosen": best, "like": None, "rule": own, **private}
    late = {} if late_rounds is None else {"late_rounds": late_rounds}
    write_json(path, {"rule": rule, "seeds": list(design.tune_seeds), **late, "tasks": content}, "choice")
    return chosen


def score_configuration(lines: Sequence[Mapping[str, Any]], rule: str) -> dict[str, Any]:
    """Return the settings of one configuration, its score for each seed, and their mean."""
    scores = [line.get(RULES[rule]) for line in lines]
    known = [score for score in scores if score is not None]
    score = statistics.fmean(known) if len(known) == len(scores) else None
    errors = [line["error"] for line in lines if "error" in line]
    runs = [line["run"] for line in lines]
    result = {"settings": lines[0]["settings"], "score": score, "scores": scores, "runs": runs}
    return result | ({"errors": errors} if errors else {})


def best_configuration(search: Sequence[Mapping[str, Any]], where: str) -> int:
    """Return the index of the configuration with the highest score, the first of several. `where` is for the error."""
    known = [(number, one["score"]) for number, one in enumerate(search) if one["score"] is not None]
    if not known:
        reason = next((one["errors"][0] for one in search if one.get("errors")), "there was nothing to test")
        raise ValueError(f"{where} has no configuration with a score: {reason}")
    return max(known, key=lambda pair: pair[1])[0]


def read_choice(folder: str | os.PathLike[str]) -> tuple[list[TuningResult], Mapping[str, Any]]:
    """Read the configurations that a study compared and chose.

    Args:
        folder: the study's folder, its `choice.json`, or a file written by `write_records`.

    Returns:
        One result per task and candidate, in the order of the file; and a mapping with the `rule` by which
        configurations were chosen and the `seeds` of the tuning runs. The mapping also has
        `late_rounds` if the study sets it: the rule "late" averages the accuracy over that many last rounds.

    Raises:
        FileNotFoundError: the folder has no `choice.json`.
        RecordError: the file is damaged, has another format, or a chosen configuration does not have the best score.
    """
    path, choices = choices_in(folder)
    results = []
    for study_rule, task, candidates in ((one["rule"], *pair) for one in choices for pair in one["tasks"].items()):
        for method, one in candidates.items():
            search = tuple({**t, "settings": plain_values(t["settings"])} for t in one["search"])
            rule = one.get("rule", study_rule) if search else None
            result = TuningResult(task, method, search, one["chosen"], one["like"], rule)
            best = max((t["score"] for t in search if t["score"] is not None), default=None)
            if search and (result.chosen is None or search[result.chosen]["score"] != best):
                raise RecordError(
                    f"{path} is damaged: configuration {result.chosen} of {method} on {task} is not the best"
                )
            results.append(result)
    rules, seeds = dict.fromkeys(c["rule"] for c in choices), dict.fromkeys(s for c in choices for s in c["seeds"])
    late = list(dict.fromkeys(c["late_rounds"] for c in choices if c.get("late_rounds") is not None))
    facts = {"rule": ", ".join(rules), "seeds": list(seeds)}
    return results, facts | ({"late_rounds": late[0] if len(late) == 1 else late} if late else {})


def tuning_table(folder: str | os.PathLike[str], *, task: str | None = None) -> Table:
    """Return a table of the configurations that the tuning runs searched, to print below a table of results.

    Args:
        folder: the study's folder, its `choice.json`, or a file written by `write_records`.
        task: name of the task to show; default: all tasks.

    Returns:
        A table with one row per task and candidate (compared method). Its columns are the number of configurations, the
        chosen values of the settings that differ between configurations, the score of the chosen configuration on the
        validation data, and the score of the worst configuration. The last column lists the settings whose chosen value
        is the smallest or largest of at least three values. For these settings, a value outside the searched range may
        be better.

    Raises:
        FileNotFoundError, RecordError: `choice.json` is missing or invalid; see `read_choice`.
        ValueError: there is no such task.
    """
    every, facts = read_choice(folder)
    if task is not None:
        check.one_of(task, "task", dict.fromkeys(t.task for t in every))
    tuned = [t for t in every if task in (None, t.task)]
    printed, rows = [], []
    for t in tuned:
        known = [one["score"] for one in t.configurations if one["score"] is not None]
        settings, edge = _chosen(t)
        size = len(t.configurations)
        failed = size - len(known)
        count = f"{size} ({failed} failed)" if failed else str(size or NONE)
        best, worst = max(known, default=None), min(known, default=None)
        shares = (NONE if score is None else f"{100 * score:.1f}" for score in (best, worst))
        printed.append((t.task, t.method, settings, count, *shares, edge or NONE))
        numbers = {"task": t.task, "method": t.method, "configurations": size, "failed": failed, "like": t.like}
        rows.append({**numbers, "settings": settings, "score": best, "worst": worst, "edge": edge})
    header = ("task", "method", "chosen", "configurations", "validation %", "worst %", "at the edge")
    own: dict[str, list[str]] = {}
    for t in tuned:
        if t.rule not in (None, facts["rule"]):
            own.setdefault(str(t.rule), []).append(t.method)
    rules = "; ".join([facts["rule"], *(f"{r} for {', '.join(dict.fromkeys(m))}" for r, m in own.items())])
    compared = "Configurations are compared on the validation part, never on the test set"
    which = "second half of the rounds" if (k := facts.get("late_rounds")) is None else f"last {k} rounds"
    late = [f"late: mean of the {which}."] if any(t.rule == "late" for t in tuned) else []
    notes = (f"{compared}; rule: {rules}; tuning seeds: {', '.join(map(str, facts['seeds']))}.", *late)
    return Table(header, tuple(printed), rows, notes, left=3)


def _chosen(t: TuningResult) -> tuple[str, str | None]:
    """Return the chosen settings that differ between configurations, and those at an edge of three or more numbers."""
    if t.like or t.chosen is None or not t.configurations:
        return f"as {t.like}" if t.like else NONE, None
    chosen = t.configurations[t.chosen]["settings"]
    tried = {name: [one["settings"].get(name) for one in t.configurations] for name in chosen}
    varied = {name: v for name, v in chosen.items() if any(value != v for value in tried[name])} or chosen
    numbers = {n: {v for v in tried[n] if isinstance(v, int | float) and not isinstance(v, bool)} for n in chosen}
    edges = [name for name, v in numbers.items() if len(v) > 2 and chosen[name] in (min(v), max(v))]
    words = [f"{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in varied.items()]
    return ", ".join(words) or NONE, ", ".join(edges) or None
