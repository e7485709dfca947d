"""Study designs that are registered before the first run, and verdicts on the claims that the designs test."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distillkit._utils import check
from distillkit._utils.files import write_atomically
from distillkit._utils.provenance import is_committed
from distillkit.study._formatting import MIN_SEEDS, signed, unit_of
from distillkit.study._groups import RecordsLike, differences_by_seed, group_records
from distillkit.study._power import PowerAnalysis
from distillkit.study._record_files import FORMATS, as_path, as_records, read_json
from distillkit.study._records import RecordError, decode_settings
from distillkit.study.comparisons import interval

__all__ = ["ClaimResult", "RegisteredDesign", "read_design", "used_seeds"]

VERDICTS = (
    "shown: the whole confidence interval of the mean difference is above 0; refuted: otherwise, the whole interval is "
    "below the stated effect; not shown: otherwise"
)
"""Rule for the verdict. It is written into every design."""


@dataclass(frozen=True)
class ClaimResult:
    """Verdict on the claim that a candidate is better than a baseline, from the runs of the registered design.

    Attributes:
        design: the registered design, which contains the claim.
        verdict: "unfinished" until both the candidate and the baseline have a result for every seed. Then "shown" if
            the whole confidence interval is above 0. Otherwise "refuted" if the whole interval is below
            `design.power.effect`, the mean difference that the study was designed to find, and "not shown" if the
            interval contains both 0 and this effect.
        differences: difference of each seed (candidate - baseline), by seed.
        low, high: ends of the confidence interval of the mean difference; None for an unfinished design.
    """

    design: RegisteredDesign
    verdict: Literal["shown", "refuted", "not shown", "unfinished"]
    differences: Mapping[int, float]
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        design, total = self.design, len(self.design.seeds)
        if self.low is None or self.high is None:
            return f"Unfinished: {len(self.differences)} of {total} seeds have a result. No interval is shown before."
        power = design.power
        unit = unit_of(design.column, [*self.differences.values()])
        name = {"%": " points", "": ""}.get(unit.name, f" {unit.name}")
        mean, low, high, effect = (
            signed(v, unit) for v in (statistics.mean(self.differences.values()), self.low, self.high, power.effect)
        )
        reason = f" The stated effect of {effect}{name} is above the interval." if self.high < power.effect else ""
        if self.verdict == "not shown":
            reason = f" The interval contains 0 and the stated effect of {effect}{name}."
        return (
            f"{self.verdict.capitalize()}: {design.method} minus {design.base} is {mean}{name} in "
            f"{design.column.replace('_', ' ')}, with the {100 * (1 - power.level):g} % interval [{low}, {high}] over "
            f"{total} seeds.{reason}"
        )


@dataclass(frozen=True)
class RegisteredDesign:
    """Design of a comparison that tests a claim, fixed in a file before the first run; see `Study.register`.

    `print(design)` shows the design as Markdown, for a page of results.

    Args:
        claim: the claim as a sentence.
        method, base: names of the candidate and the baseline.
        power: result of `power_analysis` for the pilot runs. Its column, effect and level define the test.
        used_seeds: seeds of earlier runs, which the study must not use again.
        study: JSON value that describes the study: task, candidates with the hyperparameter configurations to try,
            seeds, and the rule that chooses the best configuration.
        path: path of the design's file.

    Raises:
        ValueError: the claim is empty, the pilot runs had another task, candidate or baseline, there are fewer seeds
            than `power` requires or fewer than three, or a seed was used in the pilot runs or earlier.
    """

    claim: str
    method: str
    base: str
    power: PowerAnalysis
    used_seeds: tuple[int, ...]
    study: Mapping[str, Any]
    path: Path

    def __post_init__(self) -> None:
        if not isinstance(self.claim, str) or not self.claim.strip():
            raise ValueError(f"claim must be a sentence, got {self.claim!r}")
        if not isinstance(self.power, PowerAnalysis):
            raise TypeError(f"power must be a PowerAnalysis, as from Study.power, got {type(self.power).__name__}")
        if self.method == self.base:
            raise ValueError(f"method and base must differ, got {self.method!r} twice")
        compared = (self.task, self.method, self.base)
        if self.power.compared is not None and self.power.compared != compared:
            raise ValueError(
                f"power must come from pilot runs of the design's task, method and base, {compared}, got those of "
                f"{self.power.compared}"
            )
        if len(self.seeds) < (least := max(MIN_SEEDS, self.power.seeds)):
            raise ValueError(f"seeds must hold at least {least} seeds, as power requires; got {len(self.seeds)}")
        for name, used in (("power", self.power.differences), ("earlier", self.used_seeds)):
            if again := sorted(set(self.seeds) & set(used)):
                raise ValueError(f"seeds must be new, but runs of {name} have used {again}")

    @property
    def task(self) -> str:
        """Name of the task."""
        return decode_settings(self.study["task"]["with"])["name"]

    @property
    def column(self) -> str:
        """Name of the compared quantity, such as "accuracy_last": a column of the records of the study's runs."""
        return self.power.column

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the runs that the study compares. Runs that tune a candidate have other seeds."""
        return tuple(self.study["seeds"])

    @property
    def fingerprint(self) -> str:
        """Hash of the design's content."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()[:16]

    def evaluate(self, records: RecordsLike) -> ClaimResult:
        """Return the verdict on the claim, from the records of the study.

        Args:
            records: records, or the study's folder.

        Returns:
            The verdict, with the confidence interval. Until both candidates have a value for every seed, the verdict is
            "unfinished" and there is no interval, so that nobody can stop at a favorable seed.
        """
        groups = {(g.task, g.method): g for g in group_records(records)}
        group, base = (groups.get((self.task, name)) for name in (self.method, self.base))
        found = {} if group is None or base is None else differences_by_seed(group, base, self.column)
        differences = {seed: found[seed] for seed in self.seeds if seed in found}
        low, high = interval([*differences.values()], 1 - self.power.level)
        if len(differences) < len(self.seeds) or low is None or high is None:
            return ClaimResult(self, "unfinished", differences)
        verdict: Literal["shown", "refuted", "not shown"]
        verdict = "shown" if low > 0 else "refuted" if high < self.power.effect else "not shown"
        return ClaimResult(self, verdict, differences, low, high)

    def require(self, study: Mapping[str, Any]) -> None:
        """Check that a study has this design, and that the design's file is committed.

        Args:
            study: the study's task, candidates, seeds, and rule that chooses the best configuration, as a JSON value.

        Raises:
            ValueError: the study differs from the design, or the file has uncommitted changes or is not in a
                repository.
        """
        if changed := [key for key in {**self.study, **study} if study.get(key) != self.study.get(key)]:
            raise ValueError(f"the study must have the design in {self.path}, but differs in {', '.join(changed)}")
        if not is_committed(self.path):
            raise ValueError(f"{self.path} must be committed before the first run: git add it, and git commit")

    def write(self) -> None:
        """Write the design to its file."""
        write_atomically(self.path, json.dumps(self._content(), indent=1) + "\n")

    def _content(self) -> dict[str, Any]:
        p = self.power
        power = {
            "column": p.column, "effect": p.effect, "power": p.power, "level": p.level,
            "differences": {str(seed): value for seed, value in p.differences.items()},
            "std": p.std, "std_upper": p.std_upper, "seeds": p.seeds,
            **({} if p.compared is None else {"compared": list(p.compared)}),
        }  # fmt: skip
        return {
            "format": FORMATS["design"], "claim": self.claim, "method": self.method, "base": self.base,
            "verdicts": VERDICTS, "power": power, "used_seeds": list(self.used_seeds), "study": dict(self.study),
        }  # fmt: skip

    def __str__(self) -> str:
        study, power = self.study, self.power
        seeds, pilot, tuning = (", ".join(map(str, s)) for s in (self.seeds, power.differences, study["tune_seeds"]))
        rules = [config["rule"] or study["rule"] for config in study["candidates"].values() if len(config["tries"]) > 1]
        chosen = f"rule {' and '.join(dict.fromkeys(rules))} on the validation part, tuning seeds {tuning}"
        extend = [f"{n} for {s}" for s, n in ((study.get("extend") or {}).get("settings") or {}).items()]
        extended = f" Largest number of extensions of a search: {', '.join(extend)}." if extend else ""
        compared = self.column.replace("_", " ")
        rounds = study.get("late_rounds")
        late = "the second half of the rounds" if rounds is None else f"the last {rounds} rounds"
        meaning = f", the mean over {late}" if self.column == "accuracy_late" else ""
        lines = [
            f"**Claim:** {self.claim}",
            f"- Comparison: {self.method} with {self.base} on {self.task}, by {compared}{meaning}.",
            *(f"- Search of {name}: {_search(config)}." for name, config in study["candidates"].items()),
            *([f"- Choice of configurations: {chosen}.{extended}"] if rules else []),
            f"- Seeds: {seeds}. The pilot runs had the seeds {pilot}.",
            f"- Power: {power}",
            f"- Verdict, by the {100 * (1 - power.level):g} % interval of Student's t: {VERDICTS}.",
        ]
        return "\n".join([lines[0], "", *lines[1:]])


def read_design(path: str | os.PathLike[str]) -> RegisteredDesign:
    """Read a registered design.

    Args:
        path: path of a file that `Study.register` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: the file is damaged or was changed by hand; or another version of the library wrote it, with
            another format or another rule for the verdict (see `RegisteredDesign.evaluate`).
    """
    where = as_path(path, "path")
    if not where.is_file():
        raise FileNotFoundError(f"path {where} does not exist; Study.register writes it")
    content = read_json(where, FORMATS["design"])
    if content.get("verdicts") != VERDICTS:
        raise RecordError(f"{where} has another rule for verdicts: {content.get('verdicts')!r}")
    try:
        given = content["power"]
        differences = {int(seed): value for seed, value in given["differences"].items()}
        compared = tuple(given["compared"]) if "compared" in given else None
        numbers = (given["effect"], given["power"], given["level"])
        power = PowerAnalysis(differences, *numbers, given["column"], compared)
        names = (content["claim"], content["method"], content["base"])
        design = RegisteredDesign(*names, power, tuple(content["used_seeds"]), content["study"], where)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RecordError(f"{where} is damaged: {error}") from error
    if design._content() != content:
        raise RecordError(f"{where} is damaged: its power computation does not follow from its pilot runs")
    return design


def used_seeds(earlier: Sequence[RecordsLike]) -> tuple[int, ...]:
    """Return the seeds of all final and tuning runs in earlier records, sorted.

    Args:
        earlier: records, folders or files of earlier studies.
    """
    found: set[int] = set()
    for index, one in enumerate(check.sequence(earlier, "earlier", "records, or folders of studies")):
        records = as_records(one, f"earlier[{index}]")
        found |= {r.seed for r in records} | {key[2] for key in getattr(records, "missing", ())}
        found |= {seed for choice in getattr(records, "choices", ()) for seed in choice["seeds"]}
    return tuple(sorted(found))


def _search(config: Mapping[str, Any]) -> str:
    """Describe in one phrase the configurations that a study tries for a candidate (a method in the study).

    Args:
        config: JSON form of the candidate.
    """
    if config["like"] is not None:
        return f"none, as {config['like']}"
    fixed, tries = decode_settings(config["settings"]), decode_settings(config["tries"])
    words = [", ".join(f"{k}={v}" for k, v in one.items()) or "the defaults" for one in tries]
    always = f", always with {', '.join(f'{k}={v}' for k, v in fixed.items())}" if fixed else ""
    number = f"{len(tries)} configuration{'s' if len(tries) > 1 else ''}"
    return f"{'; '.join(words)} ({number}{always})"
