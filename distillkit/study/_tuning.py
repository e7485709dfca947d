"""Choice of the best configuration of each candidate of a study, and tables of these choices.

A candidate is a method that the study compares. A configuration consists of values of the candidate's settings. The
tables are made from the study's file `choice.json`, which records the choices.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distillkit._utils.tables import NONE, Table
from distillkit.study._record_files import FORMATS, as_path, read_json
from distillkit.study._records import RecordError, decode_settings

__all__ = [
    "RULES",
    "TuningResult",
    "best_configuration",
    "equal_search_sizes",
    "read_choice",
    "score_configuration",
    "tuning_table",
]

RULES = {"last": "accuracy_last", "late": "accuracy_late", "own": "accuracy_own"}
"""Column of the summaries from which each rule chooses the best configuration, measured on validation data."""


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


def score_configuration(lines: Sequence[Mapping[str, Any]], rule: str) -> dict[str, Any]:
    """Return the settings of one configuration, its score for each seed, and the mean of these scores.

    The score of a seed is a validation accuracy of the run with this seed. If the run failed, its score and the mean
    are None.

    Args:
        lines: summaries of the configuration's runs, one per seed.
        rule: rule to choose the best configuration, a key of `RULES`. It determines which validation accuracy is the
            score: for example, "last" uses the accuracy after the last round.
    """
    scores = [line.get(RULES[rule]) for line in lines]
    known = [score for score in scores if score is not None]
    score = statistics.fmean(known) if len(known) == len(scores) else None
    errors = [line["error"] for line in lines if "error" in line]
    runs = [line["run"] for line in lines]
    result = {"settings": lines[0]["settings"], "score": score, "scores": scores, "runs": runs}
    return result | ({"errors": errors} if errors else {})


def best_configuration(tries: Sequence[Mapping[str, Any]], where: str) -> int:
    """Return the index of the configuration with the highest score. In a tie, the first configuration is chosen.

    Args:
        tries: results of `score_configuration`, one per configuration.
        where: names of the candidate and task, used in the error message.

    Raises:
        ValueError: no configuration has a score.
    """
    known = [(number, t["score"]) for number, t in enumerate(tries) if t["score"] is not None]
    if not known:
        reason = next((t["errors"][0] for t in tries if t.get("errors")), "there was nothing to test")
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
    path = as_path(folder)
    path = path / "choice.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"folder has no choice: {path} does not exist; tuning writes it")
    choices = _choices(path)
    for choice in choices:
        kind = choice.get("format") if isinstance(choice, Mapping) else None
        if kind != FORMATS["choice"]:
            raise RecordError(
                f"{path} has the format {kind!r}, this version reads {FORMATS['choice']!r}; run the study again"
            )
    results = []
    for study_rule, task, candidates in ((one["rule"], *pair) for one in choices for pair in one["tasks"].items()):
        for method, one in candidates.items():
            tries = tuple({**t, "settings": decode_settings(t["settings"])} for t in one["tries"])
            rule = one.get("rule", study_rule) if tries else None
            result = TuningResult(task, method, tries, one["chosen"], one["like"], rule)
            scores = [t["score"] for t in tries if t["score"] is not None]
            if tries and (result.chosen is None or tries[result.chosen]["score"] != max(scores, default=None)):
                raise RecordError(
                    f"{path} is damaged: configuration {result.chosen} of {method} on {task} is not the best"
                )
            results.append(result)
    rules, seeds = dict.fromkeys(c["rule"] for c in choices), dict.fromkeys(s for c in choices for s in c["seeds"])
    late = list(dict.fromkeys(c["late_rounds"] for c in choices if c.get("late_rounds") is not None))
    facts = {"rule": ", ".join(rules), "seeds": list(seeds)}
    return results, facts | ({"late_rounds": late[0] if len(late) == 1 else late} if late else {})


def equal_search_sizes(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Check that all candidates of a task have the same number of configurations, and return this number by task.

    With different numbers, a comparison of the candidates would not be fair. A candidate whose settings are not tuned
    has one configuration. Candidates that use the chosen settings of another candidate (option `like`) are left out.

    Args:
        folder: the study's folder, its `choice.json`, or a file written by `write_records`.

    Raises:
        FileNotFoundError, RecordError: `choice.json` is missing or invalid; see `read_choice`.
        ValueError: the candidates have different numbers of configurations, or there are no candidates.
    """
    results, _ = read_choice(folder)
    counts: dict[str, dict[str, int]] = {}
    for result in results:
        if result.like is None:
            counts.setdefault(result.task, {})[result.method] = max(1, len(result.configurations))
    for task, sizes in counts.items():
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {count}" for name, count in sizes.items())
            raise ValueError(f"all candidates must have equally many configurations; on {task} they have {listed}")
    if not counts:
        raise ValueError("folder must hold a study with candidates, got one without")
    return {task: next(iter(sizes.values())) for task, sizes in counts.items()}


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
    tuned = [t for t in every if task in (None, t.task)]
    if task is not None and not tuned:
        raise ValueError(f"task must be one of {', '.join(dict.fromkeys(repr(t.task) for t in every))}, got {task!r}")
    printed, rows = [], []
    for t in tuned:
        scores = [one["score"] for one in t.configurations]
        known = [score for score in scores if score is not None]
        chosen = t.configurations[t.chosen] if t.configurations and t.chosen is not None else None
        edge = ", ".join(_edges(t.configurations, chosen["settings"])) if chosen is not None else ""
        settings = NONE if chosen is None else _format_settings(_varied(t.configurations, chosen["settings"]))
        settings = f"as {t.like}" if t.like else settings
        failed = len(scores) - len(known)
        count = f"{len(scores)} ({failed} failed)" if failed else str(len(scores) or NONE)
        best, worst = max(known, default=None), min(known, default=None)
        shares = (NONE if score is None else f"{100 * score:.1f}" for score in (best, worst))
        printed.append((t.task, t.method, settings, count, *shares, edge or NONE))
        numbers = {"task": t.task, "method": t.method, "configurations": len(scores), "failed": failed, "like": t.like}
        rows.append({**numbers, "settings": settings, "score": best, "worst": worst, "edge": edge or None})
    header = ("task", "method", "chosen", "configurations", "validation %", "worst %", "at the edge")
    seeds = ", ".join(map(str, facts.get("seeds", ())))
    own: dict[str, list[str]] = {}
    for t in tuned:
        if t.rule not in (None, facts.get("rule")):
            own.setdefault(str(t.rule), []).append(t.method)
    rules = "; ".join([str(facts.get("rule")), *(f"{r} for {', '.join(dict.fromkeys(m))}" for r, m in own.items())])
    compared = "Configurations are compared on the validation part, never on the test set"
    late = any(t.rule == "late" for t in tuned)
    which = "second half of the rounds" if (k := facts.get("late_rounds")) is None else f"last {k} rounds"
    notes = [f"{compared}; rule: {rules}; tuning seeds: {seeds}.", *([f"late: mean of the {which}."] if late else [])]
    return Table(header, tuple(printed), rows, tuple(notes), left=3)


def _choices(path: Path) -> list[Any]:
    """Return the contents of the file `choice.json`, in which a study records the chosen configurations.

    If `path` is instead a file that `write_records` wrote, return the contents of `choice.json` of each study in it.
    """
    try:
        head = json.loads(path.read_bytes().split(b"\n", 1)[0])
    except ValueError:  # a `choice.json` has several lines
        head = None
    if isinstance(head, Mapping) and head.get("format") == FORMATS["records"]:
        return list(head["choices"])
    return [read_json(path)]


def _varied(tries: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings in `chosen` that differ between the configurations `tries`. If none differs, return all."""
    varied = {k: v for k, v in chosen.items() if any(one["settings"].get(k) != v for one in tries)}
    return varied or chosen


def _edges(tries: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> list[str]:
    """Return the names of settings whose chosen value is the smallest or largest of at least three searched numbers."""
    found = []
    for name, value in chosen.items():
        values = {t["settings"].get(name) for t in tries if _is_number(t["settings"].get(name))}
        if len(values) > 2 and value in (min(values), max(values)):
            found.append(name)
    return found


def _format_settings(settings: Mapping[str, Any]) -> str:
    words = (v if isinstance(v, str) else json.dumps(v) for v in settings.values())
    return ", ".join(f"{name}={value}" for name, value in zip(settings, words)) or NONE


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
