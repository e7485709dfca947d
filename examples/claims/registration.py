"""Designs of tests that are registered before the first run, and verdicts on the claims that they test."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distillkit.study import PowerAnalysis, Record, paired_differences, read_records

VERDICTS = (
    "shown: the whole confidence interval of the mean difference is above 0; refuted: otherwise, the whole interval is "
    "below the stated effect; not shown: otherwise"
)
"""Rule for the verdict, in every design."""


@dataclass(frozen=True)
class Design:
    """Design of a comparison that tests a claim, fixed in a file before the first run; prints as Markdown.

    Attributes:
        claim: the claim as a sentence.
        method, base: names of the candidate and the baseline.
        power: power analysis of the pilot runs. Its column, effect and level define the test.
        used_seeds: seeds of earlier runs, which the study must not use again.
        study: description of the study; see `claim.described`.
    """

    claim: str
    method: str
    base: str
    power: PowerAnalysis
    used_seeds: tuple[int, ...]
    study: Mapping[str, Any]

    def __post_init__(self) -> None:
        if len(self.seeds) < max(3, self.power.seeds):
            raise ValueError(f"seeds must hold at least {self.power.seeds} and 3 seeds, got {len(self.seeds)}")
        if again := sorted(set(self.seeds) & {*self.power.differences, *self.used_seeds}):
            raise ValueError(f"seeds must be new, but earlier runs have used {again}")

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the runs that the study compares."""
        return tuple(self.study["seeds"])

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.study["task"]["with"]["name"])

    def evaluate(self, records: Sequence[Record]) -> str:
        """Return the verdict on the claim as a sentence that begins with it: shown, refuted, not shown or unfinished.

        No interval is shown before both candidates have a result for every seed.
        """
        power, total = self.power, len(self.seeds)
        own = [r for r in records if r.task == self.task and r.seed in self.seeds]
        compared = [r for r in own if r.method in (self.base, self.method) and r.last(power.column) is not None]
        pairs = set.intersection(*({r.seed for r in compared if r.method == n} for n in (self.base, self.method)))
        if len(pairs) < total:
            return f"Unfinished: {len(pairs)} of {total} seeds have a result. No interval is shown before."
        [row] = paired_differences(compared, self.base, confidence=1 - power.level, column=power.column).rows
        values = row["difference"], row["low"], row["high"], power.effect
        mean, low, high, effect = (f"{100 * v:+.1f}" for v in values)
        verdict = "Shown" if row["low"] > 0 else "Refuted" if row["high"] < power.effect else "Not shown"
        reason = f" The stated effect of {effect} points is above the interval." if row["high"] < power.effect else ""
        if verdict == "Not shown":
            reason = f" The interval contains 0 and the stated effect of {effect} points."
        return (
            f"{verdict}: {self.method} minus {self.base} is {mean} points in {power.column.replace('_', ' ')}, "
            f"with the {100 * (1 - power.level):g} % interval [{low}, {high}] over {total} seeds.{reason}"
        )

    def require(self, study: Mapping[str, Any], path: Path) -> None:
        """Check that a study has this design, and that the design's file is committed."""
        if changed := [key for key in {**self.study, **study} if study.get(key) != self.study.get(key)]:
            raise ValueError(f"the study must have the design in {path}, but differs in {', '.join(changed)}")

        def git(*words: str) -> str:
            command, folder = ["git", *words, "--", path.name], path.resolve().parent
            return subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8").stdout

        if not git("ls-files") or git("status", "--porcelain"):
            raise ValueError(f"{path} must be committed before the first run: git add it, and git commit")

    def content(self) -> dict[str, Any]:
        """Return the design as a JSON value."""
        names = ("column", "effect", "power", "level", "differences", "std", "std_upper", "seeds")
        power = json.loads(json.dumps({name: getattr(self.power, name) for name in names}))
        fields = {"claim": self.claim, "method": self.method, "base": self.base, "verdicts": VERDICTS, "power": power}
        return {**fields, "used_seeds": list(self.used_seeds), "study": dict(self.study)}

    def __str__(self) -> str:
        study, power = self.study, self.power
        seeds, pilot, tuning = (", ".join(map(str, s)) for s in (self.seeds, power.differences, study["tune_seeds"]))
        extend = ", ".join(f"{times} for {name}" for name, times in study["extend"].items())
        extended = f" Largest number of extensions of a search: {extend}." if extend else ""
        choice = f"rule {study['rule']} on the validation part, tuning seeds {tuning}.{extended}"
        compared = f"by {power.column.replace('_', ' ')}, the mean over the last {study['late_rounds']} rounds"
        lines = [
            f"- Comparison: {self.method} with {self.base} on {self.task}, {compared}.",
            *(f"- Search of {name}: {_search(config)}." for name, config in study["candidates"].items()),
            f"- Choice of configurations: {choice}",
            f"- Seeds: {seeds}. The pilot runs had the seeds {pilot}.",
            f"- Power: {power}",
            f"- Verdict, by the {100 * (1 - power.level):g} % interval of Student's t: {VERDICTS}.",
        ]
        return "\n".join([f"**Claim:** {self.claim}", "", *lines])


def read_design(path: Path) -> Design:
    """Read a registered design.

    Raises:
        ValueError: the file was changed by hand, or has another rule for the verdict.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    given, names = content["power"], (content["claim"], content["method"], content["base"])
    pilot = {int(seed): value for seed, value in given["differences"].items()}
    power = PowerAnalysis(pilot, given["effect"], given["power"], given["level"], given["column"])
    design = Design(*names, power, tuple(content["used_seeds"]), content["study"])
    if design.content() != content:
        raise ValueError(f"{path} is damaged: its verdicts or power do not follow from this version or its pilot runs")
    return design


def used_seeds(earlier: Sequence[Path]) -> tuple[int, ...]:
    """Return the seeds of all final and tuning runs of earlier studies, sorted."""
    found: set[int] = set()
    for records in map(read_records, earlier):
        found |= {r.seed for r in records} | {seed for _, _, seed in records.missing}
        found |= {seed for choice in records.choices for seed in choice["seeds"]}
    return tuple(sorted(found))


def _search(config: Mapping[str, Any]) -> str:
    """Describe the configurations of a candidate in one phrase."""
    if config["like"] is not None:
        return f"none, as {config['like']}"
    words = [", ".join(f"{k}={v}" for k, v in one.items()) or "the defaults" for one in config["search"]]
    always = ", ".join(f"{k}={v}" for k, v in config["settings"].items())
    number = f"{len(words)} configuration{'s' if len(words) > 1 else ''}"
    return f"{'; '.join(words)} ({number}{f', always with {always}' if always else ''})"
