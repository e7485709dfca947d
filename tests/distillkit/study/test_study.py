"""A study: every run once, equal numbers of configurations, a choice based on them alone, and safe interruption."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from distillkit import LabeledImages, Normalization
from distillkit._utils.provenance import RUN_FORMAT, git_commit, versions
from distillkit._utils.user_warnings import warn
from distillkit.condense import distribution_matching, random_subset
from distillkit.data import Split, partition
from distillkit.evaluate import evaluate
from distillkit.networks import ConvNet
from distillkit.networks.samplers import RandomNetworks
from distillkit.privacy import Event, Ledger
from distillkit.rng import derive
from distillkit.serialization import SerializationError, from_config
from distillkit.study import (
    Candidate,
    Condense,
    Cost,
    Job,
    Study,
    Task,
    TuningResult,
    grid,
    paired_differences,
    read_choice,
    read_records,
    summary_table,
    tuning_table,
    write_records,
)  # fmt: skip
from distillkit.study._execution import WorkerKilled, write_config
from distillkit.study.condense_candidate import run_device, save_state
from distillkit.training import Protocol
from tests.distillkit.study.sample_records import search_sizes
from tests.refused import refused


def images(count: int, seed: int) -> LabeledImages:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    pixels = torch.randn(count, 1, 8, 8, generator=rng) + 2.0 * labels.view(-1, 1, 1, 1)
    return LabeledImages(pixels, labels, num_classes=2, normalization=Normalization([0.0], [1.0]))


def task(name: str = "made", **options: Any) -> Task:
    split = Split(images(40, 0), images(20, 1), ("a", "b"))
    deal = partial(partition.iid, clients=2)
    given = {"data": split, "partition": deal, "factory_options": {"width": 4, "depth": 1}, **options}
    return Task(name, **given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Number:
    """Function of a `Known` candidate, which returns `value` and the number of classes of a network."""

    value: float
    classes: int = 2


@dataclass(frozen=True)
class Known(Candidate):
    """Candidate with a known accuracy, which counts its runs."""

    executed: ClassVar[list[str]] = []
    stop_at: ClassVar[str] = ""

    def run(self, made: Number, job: Job) -> dict[str, Any]:
        if job.run == self.stop_at:
            raise KeyboardInterrupt
        self.executed.append(job.run)
        if made.value < 0:
            raise FloatingPointError("it diverged")
        assert job.notes["validation"] == job.validation
        assert made.value == job.settings.get("value", made.value)
        share = made.value / 100
        return {"accuracy_last": share + job.seed / 1e4, "accuracy_own": 1 - share, "rounds": None}

    def trial(self, made: Number, job: Job) -> Cost:
        return Cost(made.value, 0, 2_500_000)


@dataclass(frozen=True)
class Owned(Known):
    """Candidate whose own accuracy comes from the task's `own_tests`."""

    needs_own_tests: ClassVar[bool] = True


def known(**options: Any) -> Known:
    return Known(lambda factory, value=1.0, classes=2: Number(value, classes), **options)


@pytest.fixture(autouse=True)
def fresh() -> None:
    Known.executed.clear()
    Known.stop_at = ""


def executed(study: Study) -> list[str]:
    study.run(trial=False, progress=False)
    return list(Known.executed)


def test_all_candidates_compare_equally_many_configurations(tmp_path: Path) -> None:
    candidates = {"Low": known(search=grid(value=[10, 30, 20])), "High": known(search=grid(value=[90, 70, 90]))}
    study = Study(tmp_path, task(), candidates, seeds=(0, 1), tune_seeds=(100, 101))
    done = executed(study)
    tried = [name for name in done if name.endswith(("-100", "-101"))]
    assert len(done) == len(set(done)) == 2 * 3 * 2 + 2 * 2
    assert len([name for name in tried if "low" in name]) == len([name for name in tried if "high" in name]) == 6
    assert [(r.method, r.seed, r.line["settings"]) for r in study.records()] == [
        ("Low", 0, {"value": 30}), ("Low", 1, {"value": 30}),
        ("High", 0, {"value": 90}), ("High", 1, {"value": 90}),
    ]  # fmt: skip
    said = json.loads((tmp_path / "choice.json").read_text(encoding="utf-8"))
    assert (said["rule"], said["seeds"]) == ("last", [100, 101])
    ways_said = said["tasks"]["made"]
    assert {name: one["chosen"] for name, one in ways_said.items()} == {"Low": 1, "High": 0}  # of equals the first
    assert {len(candidate["search"]) for candidate in ways_said.values()} == {3}
    assert ways_said["Low"]["search"][1]["score"] == pytest.approx(0.3 + 100.5 / 1e4)


@pytest.mark.parametrize("name", ["A 0-5", "(A 0-5)"])
def test_study_resumes_after_an_interruption(name: str, tmp_path: Path) -> None:
    def study(folder: str) -> Study:
        candidates = {"A 0.5": known(search=grid(value=[1, 2])), name: known(search=grid(value=[3, 4]))}
        return Study(tmp_path / folder, task(), candidates, seeds=(0, 1))

    whole = executed(study("whole"))
    for place in whole:
        Known.executed.clear()
        Known.stop_at = place
        with pytest.raises(KeyboardInterrupt):
            executed(study(place))
        Known.stop_at = ""
        assert executed(study(place)) == whole
        for file in ("choice.json", "summary.json"):
            assert (tmp_path / place / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert executed(study("whole")) == whole  # nothing is done twice


def test_each_run_is_reported_once_when_it_ends(tmp_path: Path) -> None:
    def told(seeds: tuple[int, ...]) -> list[Any]:
        lines: list[Any] = []
        study = Study(tmp_path, task(), {"A": known(search=grid(value=[1, 2]))}, seeds=seeds)
        study.run(trial=False, progress=False, on_run=lines.append)
        return lines

    lines = told((0,))
    written = json.loads((tmp_path / "made-a-0" / "summary.json").read_text(encoding="utf-8"))
    assert lines == [{name: value for name, value in written.items() if name != "checksum"}]
    for damage in (Path.unlink, lambda path: path.write_bytes(b"[")):  # as after an interruption before it was written
        damage(tmp_path / "summary.json")
        assert told((0,)) == []
        assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == lines
    assert [line["run"] for line in told((0, 1))] == ["made-a-1"]
    with pytest.raises(TypeError, match=r"on_run is called as on_run\(line\)"):
        Study(tmp_path, task(), {"A": known()}).run(on_run=3)  # type: ignore[arg-type]


def test_progress_costs_and_commit_are_shown(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    shown = SimpleNamespace(update=lambda: seen.append(1), set_postfix_str=seen.append, clear=lambda: None)
    count = lambda total, what, **given: seen.append((total, what)) or contextlib.nullcontext(shown)  # noqa: E731
    monkeypatch.setattr("distillkit.study.study.bar", count)
    study = Study(tmp_path, task(), {"A": known(search=grid(value=[10, 20]))}, seeds=(0,))
    study.run(progress=False)
    assert capsys.readouterr().out == ""
    assert seen == [
        (2, "tuning runs"), 1, "made-a-0-100: 11.0 %", 1, "made-a-1-100: 21.0 %", (1, "runs"), 1, "made-a-0: 20.0 %",
    ]  # fmt: skip
    again = Study(tmp_path, task(), {"A": known(search=grid(value=[10, 20]))}, seeds=(0, 1))
    said = str(again.estimate())
    [first, _] = again.run()
    assert capsys.readouterr().out.split("|")[:8] == said.split("|")[:8]
    assert first.line["commit"] == git_commit()
    again.run()
    assert capsys.readouterr().out == ""  # all is done


def test_seeds_candidates_and_tasks_can_be_added_but_not_changed(tmp_path: Path) -> None:
    candidates = {"A": known(search=grid(value=[1, 2]))}
    executed(Study(tmp_path, task(), candidates, seeds=(0,)))
    Known.executed.clear()
    more = Study(tmp_path, [task(), task("other")], {**candidates, "B": known(search=grid(value=[3, 4]))}, seeds=(0, 1))
    assert set(executed(more)) == {
        "made-b-0-100", "made-b-1-100", "other-a-0-100", "other-a-1-100", "other-b-0-100", "other-b-1-100",
        "made-b-0", "made-a-1", "made-b-1", "other-a-0", "other-b-0", "other-a-1", "other-b-1",
    }  # fmt: skip
    said = (tmp_path / "choice.json").read_bytes()
    executed(Study(tmp_path, task(), candidates, seeds=(0,)))
    assert (tmp_path / "choice.json").read_bytes() == said  # candidates that are not requested again stay
    executed(Study(tmp_path, [task("other"), task()], {"B": more.design.candidates["B"], **candidates}, seeds=(0, 1)))
    expected = [(t, m, seed) for t in ("made", "other") for m in "AB" for seed in (0, 1)]  # the order stays
    assert [(r.task, r.method, r.seed) for r in read_records(tmp_path)] == expected
    with pytest.raises(ValueError, match="different candidates with the names A"):
        executed(Study(tmp_path, task(), {"A": known(search=grid(value=[1, 5]))}))
    with pytest.raises(ValueError, match=r"different tasks with the names made \(rounds: was 10, now 3\)"):
        executed(Study(tmp_path, task(rounds=3), candidates))
    changed = task(rounds=3, factory_options={"width": 8, "depth": 1, "norm": "none"})
    words = r"made \(factory_options.width: was 4, now 8; factory_options.norm: was null, now .none.; rounds: was 10"
    refused(lambda: executed(Study(tmp_path, changed, candidates)), ValueError, f"tasks with the names {words}")
    own = Study(tmp_path, task(), candidates, rule="own")
    refused(lambda: executed(own), ValueError, "study.json has rule=last, got own")


def test_study_is_corrected_in_its_folder_until_a_run_was_started(tmp_path: Path) -> None:
    wrong, pair = known(settings={"valeu": 1}), known(settings={"classes": (2, 3)})
    refused(lambda: executed(Study(tmp_path, task(rounds=3), {"A": wrong}, seeds=(0,), rule="own")), TypeError, "valeu")
    assert (tmp_path / "study.json").exists()
    Known.executed.clear()
    assert executed(Study(tmp_path, task(), {"A": known(settings={"value": 1})}, seeds=(0,))) == ["made-a-0"]
    with pytest.raises(ValueError, match="different tasks with the names made"):
        executed(Study(tmp_path, task(rounds=3), {"A": known(settings={"value": 1})}, seeds=(0,)))
    executed(Study(tmp_path / "pair", task(), {"A": pair}, seeds=(0,)))
    listed = Study(tmp_path / "pair", task(), {"A": known(settings={"classes": [2, 3]})}, seeds=(0,))
    refused(lambda: executed(listed), ValueError, r"different candidates with the names A \(another form\);")
    candidates = {"A": known(search=grid(value=[1, 2]))}
    Study(tmp_path / "tuned", task(), candidates).tune(trial=False, progress=False)
    for other, said in ((task(rounds=3), "different tasks"), (task(), "study.json has rule=last, got own")):
        study = Study(tmp_path / "tuned", other, candidates, rule="own" if "rule" in said else "last")
        refused(lambda study=study: study.tune(progress=False), ValueError, said)


def test_failing_configuration_is_never_chosen_and_has_a_reason(tmp_path: Path) -> None:
    executed(Study(tmp_path / "a", task(), {"A": known(search=grid(value=[-1, 0]))}, seeds=(0,)))
    tries = json.loads((tmp_path / "a" / "choice.json").read_text(encoding="utf-8"))["tasks"]["made"]["A"]["search"]
    assert (tries[0]["score"], tries[0]["errors"]) == (None, ["FloatingPointError: it diverged"])
    said = r"candidates\['A'\] on made has no configuration with a score: FloatingPointError"
    with pytest.raises(ValueError, match=said):
        executed(Study(tmp_path / "b", task(), {"A": known(search=grid(value=[-1, -2]))}, seeds=(0,)))
    with pytest.raises(FloatingPointError):
        executed(Study(tmp_path / "c", task(), {"A": known(settings={"value": -1})}, seeds=(0,)))


def test_candidate_may_have_its_own_rule_named_in_the_choice(tmp_path: Path) -> None:
    tries = grid(value=[10, 30])
    personal = known(search=tries, rule="own")
    candidates = {"Global": known(search=tries), "Personal": personal, "Control": known(like="Personal")}
    study = Study(tmp_path, task(), candidates, seeds=(0,))
    executed(study)
    assert [r.line["settings"] for r in study.records()] == [{"value": value} for value in (30, 10, 10)]
    tuned, facts = read_choice(tmp_path)
    assert [one.rule for one in tuned] == ["last", "own", None]
    assert facts["rule"] == "last"
    assert "rule: last; own for Personal; tuning seeds" in str(tuning_table(tmp_path))
    with pytest.raises(ValueError, match="different candidates with the names Personal"):
        executed(Study(tmp_path, task(), {"Personal": known(search=tries)}, seeds=(0,)))
    refused(lambda: known(rule="best"), ValueError, "rule must be one of")
    refused(lambda: known(like="A", rule="own"), ValueError, "like='A' uses that candidate's choice")


@dataclass(frozen=True)
class Rounds(Known):
    """Candidate whose accuracies in rounds 2 and 3 are `value`, with a spike in the last round of seed 100."""

    def run(self, made: Number, job: Job) -> dict[str, Any]:
        found = super().run(made, job)
        last = 0.9 - 1.5 * made.value / 100 if job.seed == 100 else made.value / 100
        accuracies = [0.5, *[made.value / 100] * 2, last]
        lines = [json.dumps({"round": t, "accuracy": a}) for t, a in enumerate(accuracies, 1)]
        (job.folder / "history.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return found | {"accuracy_last": last, "rounds": 4}


def with_rounds(values: list[float], **options: Any) -> Rounds:
    return Rounds(lambda factory, value: Number(value), search=grid(value=values), **options)


@pytest.mark.parametrize("rule", ["late", "last"])
@pytest.mark.parametrize(
    ("late", "mean"), [(None, [0.425, 0.375]), (1, [0.75, 0.45]), (3, [0.95 / 3, 0.35]), (9, [0.3625, 0.3875])]
)
def test_late_rule_averages_the_last_rounds(tmp_path: Path, late: int | None, mean: list[float], rule: str) -> None:
    def study(**options: Any) -> Study:
        own: Any = {"late": {"B": "last"}, "last": {"A": "late"}}[rule]
        candidates = {name: with_rounds([10, 30], rule=own.get(name)) for name in "AB"}
        return Study(tmp_path, task(), candidates, seeds=(0,), **{"rule": rule, "late_rounds": late, **options})

    study().run(trial=False, progress=False)
    tuned, facts = read_choice(tmp_path)
    assert [one["score"] for one in tuned[0].configurations] == pytest.approx(mean)
    assert (tuned[0].rule, tuned[0].chosen) == ("late", mean.index(max(mean)))
    assert (tuned[1].rule, tuned[1].chosen) == ("last", 0)
    assert facts.get("late_rounds") == late
    which = "second half of the rounds" if late is None else f"last {late} rounds"
    assert f"late: mean of the {which}." in str(tuning_table(tmp_path))
    refused(lambda: executed(study(late_rounds=2)), ValueError, f"study.json has late_rounds={late}, got 2")
    refused(lambda: study(late_rounds=0), ValueError, "late_rounds must be at least 1, got 0")


def test_search_may_be_continued_and_replaces_runs_of_a_former_choice(tmp_path: Path) -> None:
    def study(*values: float) -> Study:
        other = known(search=grid(value=(50, 1, 2, 3)[: len(values)]))
        candidates = {"A": known(search=grid(value=values)), "B": other}
        return Study(tmp_path, task(), candidates, seeds=(0,))

    assert executed(study(10, 30))[-2:] == ["made-a-0", "made-b-0"]
    Known.executed.clear()
    tuned = study(10, 30, 40).tune(trial=False, progress=False)
    assert Known.executed == ["made-a-2-100", "made-b-2-100"]
    assert [(one.method, one.chosen, len(one.configurations)) for one in tuned] == [("A", 2, 3), ("B", 0, 3)]
    assert executed(study(10, 30, 40))[2:] == ["made-a-0"]
    assert [r.line["settings"] for r in study(10, 30).records()] == [{"value": 40}, {"value": 50}]
    old = json.loads((tmp_path / "replaced" / "made-a-0-1" / "summary.json").read_text(encoding="utf-8"))
    assert old["settings"] == {"value": 30}
    assert study(10, 30, 40).tune(trial=False, progress=False, seconds=1e-9) == tuned
    assert study(10, 30, 40, 60).tune(trial=False, progress=False, seconds=1e-9) == []
    executed(study(10, 30, 40, 60))
    assert sorted(path.name for path in (tmp_path / "replaced").iterdir()) == ["made-a-0-1", "made-a-0-2"]
    study(10).tune(trial=False, progress=False)  # the folder keeps what it was asked before
    said = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))
    assert [len(one["search"]) for one in said["candidates"].values()] == [4, 4]
    refused(lambda: executed(study(10, 30, 45)), ValueError, r"names A")


def test_configurations_may_be_compared_on_another_task(tmp_path: Path) -> None:
    study = Study(tmp_path, task(), {"A": known(search=grid(value=[10, 30]))}, seeds=(0,), tune_on=task("public"))
    assert executed(study) == ["public-a-0-100", "public-a-1-100", "made-a-0"]
    assert study.records()[0].line["settings"] == {"value": 30}
    one, two = task("one"), task("two")
    here = {"Like": known(like="A", tasks=["two"]), "A": known(search=grid(value=[10, 30]), tasks=["one"])}
    study = Study(tmp_path / "here", [one, two], here, seeds=(0,), tune_on=one)
    assert executed(study)[-2:] == ["one-a-0", "two-like-0"]
    assert [r.line["settings"] for r in study.records()] == [{"value": 30}] * 2


def test_control_uses_anothers_settings_and_its_own(tmp_path: Path) -> None:
    candidates = {
        "A": known(search=grid(value=[10, 30]), settings={"value": 20, "classes": 2}),
        "Like A": known(settings={"classes": torch.tensor(3)}, like="A"),
    }
    study = Study(tmp_path, task(), candidates, seeds=(0,))
    assert executed(study) == ["made-a-0-100", "made-a-1-100", "made-a-0", "made-like-a-0"]
    like = study.records()[1]
    settings = [[*item] for item in sorted(like.line["settings"].items())]
    assert from_config(settings, store=like.folder / "arguments") == [["classes", 3], ["value", 30]]
    tuned, control = read_choice(tmp_path)[0]
    assert [one["settings"] for one in tuned.configurations] == grid(value=[10, 30], classes=[2])
    assert control == TuningResult("made", "Like A", (), None, "A")
    said = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))
    others = {"rule": "last", "late_rounds": None, "tune_seeds": [100], "tune_on": None, "versions": versions()}
    assert {name: said[name] for name in others} == others
    planned = said["candidates"]["Like A"]
    assert (planned["like"], planned["rule"]) == ("A", None)
    assert from_config(planned["settings"], store=tmp_path / "arguments") == {"classes": 3}


def test_ablation_runs_only_on_its_tasks_and_seeds(tmp_path: Path) -> None:
    candidates = {
        "A": known(search=grid(value=[10, 30])),
        "B": known(search=grid(value=[10, 20]), tasks=["two"]),
        "C": known(like="A", settings={"value": 50.0}, tasks=["two"], seeds=[1]),
    }

    def study() -> Study:
        return Study(tmp_path, [task("one"), task("two")], candidates, seeds=(0, 1))

    everything = ["one-a-0", "two-a-0", "two-b-0", "one-a-1", "two-a-1", "two-b-1", "two-c-1"]
    tries = ["one-a-0-100", "one-a-1-100", "two-a-0-100", "two-a-1-100", "two-b-0-100", "two-b-1-100"]
    assert sum(row.runs for row in study().estimate().rows) == len(everything) + len(tries)
    assert executed(study()) == [*tries, *everything]
    assert {record.line["run"] for record in study().records()} == set(everything)
    assert study().records().missing == ()
    assert {t.method for t in read_choice(tmp_path)[0] if t.task == "one"} == {"A"}
    (tmp_path / "two-c-1" / "summary.json").unlink()
    assert study().records().missing == (("two", "C", 1),)
    Known.executed.clear()
    assert executed(Study(tmp_path, [task("one"), task("two")], {"A": candidates["A"]}, seeds=(0, 1))) == []
    assert study().records().missing == (("two", "C", 1),)  # what the folder has asked for stays asked for
    candidates["C"] = replace(candidates["C"], seeds=[0, 1])
    assert executed(study()) == ["two-c-0", "two-c-1"]


TWO: dict[str, Any] = {"tasks": [task("one", own_tests=0.2), task("two"), task("three")]}
OWNED = Owned(lambda factory, value: 0, search=grid(value=[1, 2]))
OTHERS = {"B": known(), "C": known(like="B")}
INVALID: list[tuple[dict[str, Any], str]] = [
    (
        {"candidates": {"A": known(search=grid(value=[1, 2])), "B": known()}},
        "equally many configurations, for a fair comparison; got A 2, B 1. Use",
    ),
    ({"candidates": {"A": OWNED, **OTHERS}}, "equally many configurations, for a fair comparison; got A 2, B 1. Use"),
    ({"candidates": {}}, "candidates must hold at least one"),
    ({"candidates": {"A b": known(), "a-b": known()}}, "differ in their letters and digits, got ['A b', 'a-b']"),
    ({"candidates": {"=": known()}}, "candidates must have names that differ in their letters and digits, got ['=']"),
    ({"candidates": {"A": known(like="B")}}, "candidates['A'].like must name a candidate without like, got 'B'"),
    ({"candidates": {**OTHERS, "D": known(like="C")}}, "'D'].like must name a candidate without like, got 'C'"),
    (
        {"candidates": {"A": known(), "B": replace(known(like="A"), make=None)}},
        "'B'] was read from a record and has no make",
    ),
    (
        {"candidates": {"A": known(tasks=["two"])}},
        "candidates['A'].tasks must be among the study's ['made'], got ['two']",
    ),
    ({"candidates": {"A": known(seeds=[7])}}, "candidates['A'].seeds must be among the study's [0, 1, 2], got [7]"),
    ({"candidates": {"A": known(tasks=["two", "made"])}}, "'A'].tasks must be among the study's ['made'], got ['two']"),
    ({"candidates": {"A": known(seeds=[0, 7])}}, "candidates['A'].seeds must be among the study's [0, 1, 2], got [7]"),
    (
        {"tasks": [task("one"), task("two")], "candidates": {"A": known(tasks=["one"]), "B": known(like="A")}},
        "like='A' must run on all tasks of 'B', but not on ['two']",
    ),
    (
        {**TWO, "candidates": {"A": known(tasks=["one"]), "B": known(like="A", tasks=["one", "two"])}},
        "candidates['B'].like='A' must run on all tasks of 'B', but not on ['two']",
    ),
    ({"seeds": (100,), "tune_seeds": (100,)}, "tune_seeds and seeds must be disjoint, but both contain [100]"),
    ({"seeds": (9, 101, 100)}, "tune_seeds and seeds must be disjoint, but both contain [100, 101]"),
    ({"seeds": ()}, "seeds must hold at least one"),
    ({"tune_seeds": (7, 7)}, "tune_seeds must hold at least one seed, without duplicates; got [7, 7]"),
    ({"seeds": (0, -1)}, "seeds[1] must be at least 0, got -1"),
    ({"tasks": [task(), task()]}, "tasks must hold at least one task, with different names; got ['made', 'made']"),
    ({"tune_on": task(rounds=3)}, "tune_on must have a name of its own or be one of tasks; got another 'made'"),
    ({"rule": "best"}, "rule must be one of"),
    (
        {"rule": "own", "candidates": {"A": OWNED}},
        "rule='own' chooses by the clients' own test sets, but the task 'made' has none",
    ),
    (
        {**TWO, "rule": "own", "candidates": {"A": replace(OWNED, tasks=["one", "three"])}},
        "rule='own' chooses by the clients' own test sets, but the task 'three' has none: set Task(own_tests=0.2), or "
        "choose candidates['A'] by another rule",
    ),
]
WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"candidates": {"A": 3}}, "candidates['A'] must be a Candidate"),
    ({"out": None}, "out must be"),
    ({"tasks": [task(), 3]}, "tasks[1] must be a Task"),
    ({"tasks": 3}, "tasks"),
    ({"tune_on": "digits"}, "tune_on must be a Task"),
]


@pytest.mark.parametrize(
    ("options", "words", "error"),
    [*((*one, ValueError) for one in INVALID), *((*one, TypeError) for one in WRONG_TYPES)],
)
def test_invalid_arguments_are_named(tmp_path: Path, options: dict[str, Any], error: Any, words: str) -> None:
    given = {"out": tmp_path, "tasks": task(), "candidates": {"A": known()}, "tune_seeds": (100, 101), **options}
    refused(lambda: Study(**given), error, re.escape(words))


@pytest.mark.parametrize("rule", ["own", "late"])
def test_a_rule_without_a_column_in_the_summaries_is_refused_at_once(tmp_path: Path, rule: Any) -> None:
    made = Condense(few(1), search=grid(lr=[0.1, 1.0]))
    words = rf"rule='{rule}' cannot choose for candidates\['A'\], because a Condense has no accuracy_{rule}: "
    words += "pass rule='last' to this candidate"
    refused(lambda: Study(tmp_path, task(own_tests=0.2), {"A": made}, rule=rule), ValueError, words)
    candidates = {"A": replace(made, rule="last"), "B": replace(made, search=[{}], like="A")}
    Study(tmp_path, task(own_tests=0.2), candidates, rule=rule)


def test_own_rule_needs_own_tests_where_it_chooses(tmp_path: Path) -> None:
    tuned = {"A": Owned(lambda factory, value=1: Number(value), search=grid(value=[1, 2]))}
    Study(tmp_path / "a", task(), tuned, rule="own", tune_on=task("other", own_tests=0.2))
    Study(tmp_path / "b", task(), {"A": known(search=grid(value=[1, 2]))}, rule="own")  # finds its accuracy itself
    Study(tmp_path / "c", task(), {"A": Owned(lambda factory: Number(1.0))}, rule="own")  # nothing is chosen
    own = {"A": replace(tuned["A"], rule="own")}
    refused(lambda: Study(tmp_path / "d", task(), own, rule="last"), ValueError, "the task 'made' has none")


def test_invalid_candidate_is_refused_with_the_reason() -> None:
    assert known(settings={"value": 3}, search=grid(value=[1]), seeds=[1]).for_record() == Known(None)
    refused(lambda: known(tasks=[]), ValueError, "tasks must hold at least one")
    refused(lambda: known(tasks="digits"), TypeError, "tasks")
    refused(lambda: Known(3), TypeError, "make must be a function .*, got int$")
    refused(lambda: Known(dict), TypeError, "make must state its arguments, which <class 'dict'> does not")
    refused(lambda: known(search=[]), ValueError, "search must hold at least one")
    refused(lambda: known(search=["lr"]), TypeError, "search\\[0\\]")
    for search in (grid(value=[1, 2]), grid(value=[1])):
        refused(lambda search=search: known(search=search, like="A"), ValueError, "like='A'")
    wrong: dict[str, Any] = {"num_networks": 0, "threads": 0, "delta": 1.0, "protocol": Protocol, "tested": 3}
    for name, value in wrong.items():
        refused(lambda name=name, value=value: Condense(few(1), **{name: value}), (TypeError, ValueError), name)  # type: ignore[misc]
    assert grid(a=[1, 2], b=[3, 4]) == [{"a": 1, "b": 3}, {"a": 1, "b": 4}, {"a": 2, "b": 3}, {"a": 2, "b": 4}]
    refused(lambda: grid(lr=[]), ValueError, "lr must have at least one value")


def test_task_without_a_name_is_refused_first(tmp_path: Path) -> None:
    odd = {"value": object()}
    for name, candidate in (("settings", known(settings=odd)), ("search", known(search=[odd]))):
        study = Study(tmp_path, task(), {"A": candidate})
        refused(lambda study=study: executed(study), SerializationError, rf"candidates\['A'\]\.{name}")
    measured = Condense(few(1), measure=lambda small, job: {})
    study = Study(tmp_path, task(), {"A": measured})
    refused(lambda: executed(study), SerializationError, r"candidates\['A'\]\.measure")
    study = Study(tmp_path, task(partition=lambda labels: [torch.arange(len(labels))]), {"A": known()})
    refused(lambda: executed(study), SerializationError, "tasks\\['made'\\].partition")
    assert not Known.executed


def few(steps: int, lr: float = 1.0) -> Any:
    return lambda factory, lr=lr: partial(
        distribution_matching, networks=RandomNetworks(factory), ipc=2, steps=steps, lr=lr, batch_real=8
    )


def whole(real: LabeledImages, *, generator: Any, callback: Any = None) -> LabeledImages:
    assert callback is None  # without `resume` it is of another kind than a condenser's, and not used
    states = [derive(3, what).get_state() for what in ("condense", "trial")]
    assert any(torch.equal(generator.get_state(), state) for state in states)
    return real


def brightness(small: LabeledImages, job: Job) -> dict[str, Any]:
    real, _ = job.task.pooled(job.split)
    return {"own": {"pixels": small.images.numel(), "brighter": bool(small.images.mean() > real.images.mean())}}


def test_measure_adds_columns_to_final_runs_and_to_their_configs(tmp_path: Path) -> None:
    protocol = Protocol(epochs=1)
    candidate = Condense(few(1), search=grid(lr=[0.1, 1.0]), num_networks=1, protocol=protocol, measure=brightness)
    records = Study(tmp_path, task(), {"DM": candidate}, seeds=(0, 1)).run(processes=1, progress=False)
    assert [set(r.line["own"]) for r in records] == [{"pixels", "brighter"}] * 2
    assert records[0].last("own.pixels") == LabeledImages.load(records[0].folder / "set.safetensors").images.numel()
    tried = [json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "tuning").glob("*/summary.json")]
    assert len(tried) == 2
    assert not any("own" in line for line in tried)
    notes = json.loads((records[0].folder / "config.json").read_text(encoding="utf-8"))["notes"]
    assert "brightness" in json.dumps(notes["candidate"])
    assert notes["commit"] == records[0].line["commit"]
    configs = [json.loads((r.folder / "config.json").read_text(encoding="utf-8")) for r in records if r.folder]
    assert [config["seed"] for config in configs] == [0, 1]
    with pytest.raises(TypeError, match=r"measure is called as measure\(small, job\)"):
        Condense(few(1), measure=lambda small: {})


def test_estimate_counts_every_epoch_and_one_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def takes(seconds: float) -> Any:
        return lambda *given, **options: clock.__setitem__(0, clock[0] + seconds)

    def trained(network: Any, data: Any, protocol: Protocol, **options: Any) -> None:
        takes(2.0 * (protocol.epochs + 1))()  # so many `train` does, as the papers' code

    def made(real: LabeledImages, *, generator: Any) -> LabeledImages:
        takes(torch.get_num_threads() + len(real) / 10)()
        warn("the run itself warns")
        return random_subset(real, ipc=1, generator=generator)

    candidate = Condense(lambda factory: made, num_networks=3, protocol=Protocol(epochs=50), threads=3)
    monkeypatch.setattr("distillkit.study.condense_candidate.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("distillkit.study.condense_candidate.train", trained)
    monkeypatch.setattr("distillkit.study.condense_candidate.accuracy", lambda _, test: takes(float(len(test)))())
    for tested in (500, 5):
        monkeypatch.setattr("distillkit.study.condense_candidate._TRIAL_TEST_IMAGES", tested)
        with warnings.catch_warnings(action="error"):
            study = Study(tmp_path / f"of {tested}", task(), {"A": candidate}, seeds=(0,))
            assert study.estimate().seconds == 7 + 3 * (51 * 2 + 20)

    def stepping(real: LabeledImages, *, steps: int, callback: Any, resume: Any) -> LabeledImages:
        for step in range(1, steps + 1):
            takes(9.0 if step == 1 else 5.0)()
            callback(SimpleNamespace(step=step, steps=steps))
        raise AssertionError("a trial ends early")

    for steps in (20, 4, 2):
        stepped = replace(candidate, make=lambda factory, steps=steps: partial(stepping, steps=steps))
        found = Study(tmp_path / str(steps), task(), {"A": stepped}, seeds=(0,)).estimate().seconds
        assert found == 9 + 5 * (steps - 1) + 3 * (51 * 2 + 20)


@pytest.mark.parametrize(
    "wrong", [{"num_networks": 0}, {"threads": 0}, {"delta": 1.0}, {"protocol": Protocol}],
    ids=["num_networks", "threads", "delta", "protocol"],
)  # fmt: skip
def test_evaluation_options_are_checked_before_the_set_is_made(wrong: dict[str, Any]) -> None:
    refused(lambda: Condense(lambda factory: random_subset, **wrong), (TypeError, ValueError), next(iter(wrong)))


def test_private_condenser_gets_a_ledger_and_reports_its_epsilon(tmp_path: Path) -> None:
    def charged(real: LabeledImages, *, ledger: Ledger, generator: Any, more: Any = ()) -> LabeledImages:
        for seeded in (False, *more):
            ledger.spend(Event("a test", sigma=2.0, rate=1.0, count=1, seeded=seeded))
        return random_subset(real, ipc=1, generator=generator).replace(info={"sigma": 2.0})

    candidate = Condense(lambda factory: charged, num_networks=1, protocol=Protocol(epochs=1), delta=1e-6)
    some = replace(candidate, make=lambda factory: partial(charged, more=[True]))
    study = Study(tmp_path, task(), {"A": candidate, "B": some}, seeds=(0,))
    record, mixed = study.run(trial=False, progress=False)
    assert (mixed.line["noise"], mixed.line["epsilon"]) == ("seeded", None)
    assert "seeded" in mixed.line["epsilon_reason"]
    assert record.line.keys() == mixed.line.keys() - {"epsilon_reason"}
    assert study.guarantee("made").reason == mixed.line["epsilon_reason"]
    assert record.line["epsilon"] == Ledger(tmp_path / "made-a-0" / "ledger.jsonl", delta=1e-6).epsilon()
    assert record.line["sigma"] == 2.0
    said = {name: record.line[name] for name in ("delta", "relation", "noise")}
    assert said == {"delta": 1e-6, "relation": "add or remove one record", "noise": "operating system"}
    config = json.loads((tmp_path / "made-a-0" / "config.json").read_text(encoding="utf-8"))
    assert "charged" in config.pop("recipe_missing")
    notes = config.pop("notes")
    others = {"recipe": None, "format": RUN_FORMAT, "seed": 0, "device": "cpu", "versions": versions()}
    assert (config, notes["method"], notes["validation"]) == (others, "A", False)


def test_condensers_with_callbacks_and_full_data_sets_run(tmp_path: Path) -> None:
    candidate, split = Condense(lambda factory: whole, num_networks=2, protocol=Protocol(epochs=1)), task().load()
    [record] = Study(tmp_path, task(), {"all": candidate}, seeds=(3,)).run(progress=False)
    real, test = task().pooled(split)
    options: dict[str, Any] = {"protocol": candidate.protocol, "generator": derive(3, "evaluate"), "progress": False}
    [row] = evaluate(real, test, partial(task().network(split), 2), num_networks=2, **options).rows
    assert record.line["images"] == len(real)
    assert record.line["accuracies"] == list(row.accuracies)
    assert not (tmp_path / "made-all-3" / "set.safetensors").exists()
    assert record.line["epsilon"] is None
    assert 0 <= record.line["cpu_seconds_condense"] <= record.line["cpu_seconds_test"]
    assert record.line["seconds"] == pytest.approx(record.line["seconds_condense"] + record.line["seconds_test"])
    assert record.line["accuracy_std"] == row.std
    fixed = replace(candidate, make=lambda factory: partial(lambda real, *, generator: real[:generator], generator=6))
    [short] = Study(tmp_path / "fixed", task(), {"A": fixed}, seeds=(3,)).run(trial=False, progress=False)
    assert short.line["images"] == 6


def test_existing_set_is_not_remade_and_its_seconds_are_unknown(tmp_path: Path) -> None:
    """Interrupted between the set and its evaluation: the set is reused, and no wrong time is recorded."""
    made: list[int] = []

    def make(real: LabeledImages, *, generator: Any) -> LabeledImages:
        made.append(1)
        return random_subset(real, ipc=1, generator=generator)

    candidates = {"A": Condense(lambda factory: make, num_networks=1, protocol=Protocol(epochs=1))}
    [first] = Study(tmp_path / "one", task(), candidates, seeds=(0,)).run(trial=False, progress=False)
    again = tmp_path / "two" / "made-a-0"
    again.mkdir(parents=True)
    (again / "set.safetensors").write_bytes((tmp_path / "one" / "made-a-0" / "set.safetensors").read_bytes())
    [second] = Study(tmp_path / "two", task(), candidates, seeds=(0,)).run(trial=False, progress=False)
    assert len(made) == 1
    assert second.line["hash"] == first.line["hash"]
    assert (second.line["seconds_condense"], second.line["cpu_seconds_condense"]) == (None, None)
    assert first.line["seconds_condense"] > 0


def test_interrupted_condenser_continues_from_its_saved_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distillkit.study.condense_candidate._SAVE_INTERVAL", 0.0)
    candidates = {"A": Condense(few(3), settings={"lr": 1.0}, num_networks=1, protocol=Protocol(epochs=1))}
    [whole] = Study(tmp_path / "whole", task(), candidates, seeds=(0,)).run(trial=False, progress=False)
    state = tmp_path / "stopped" / "made-a-0" / "state.safetensors"

    def stops(path: Path, found: Any) -> None:
        save_state(path, found)
        raise KeyboardInterrupt

    monkeypatch.setattr("distillkit.study.condense_candidate.save_state", stops)
    study = Study(tmp_path / "stopped", task(), candidates, seeds=(0,))
    with pytest.raises(KeyboardInterrupt):
        study.run(trial=False, progress=False)
    assert state.exists()
    changed = Study(tmp_path / "stopped", task(rounds=3), candidates, seeds=(0,))
    refused(lambda: executed(changed), ValueError, "different tasks with the names made")
    monkeypatch.setattr("distillkit.study.condense_candidate.save_state", save_state)
    [found] = study.run(trial=False, progress=False)
    assert found.line["hash"] == whole.line["hash"]
    assert found.line["seconds_condense"] is None
    assert not state.exists()


def test_functions_that_return_no_set_are_refused_by_type(tmp_path: Path) -> None:
    candidate = Condense(lambda factory: lambda real: real.images, num_networks=1, protocol=Protocol(epochs=1))
    with pytest.raises(TypeError, match="the condenser that make returned must return a LabeledImages, got Tensor"):
        Study(tmp_path, task(), {"A": candidate}, seeds=(0,)).estimate()


def test_condenser_may_request_the_task(tmp_path: Path) -> None:
    asked: list[str] = []
    candidate = Known(lambda factory, task: asked.append(task.name) or Number(1.0))
    Study(tmp_path, [task("one"), task("two")], {"A": candidate}, seeds=(0,)).run(trial=False, progress=False)
    assert asked == ["one", "two"]


def test_errors_name_a_wrong_setting_and_a_script_without_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(tmp_path, task(), {"A": known(settings={"learning": 1})}, seeds=(0,))
    refused(lambda: executed(study), TypeError, "candidates\\['A'\\] cannot be built with {'learning': 1}")
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    refused(lambda: executed(study), RuntimeError, "if __name__ == '__main__'")


def test_estimated_time_counts_the_remaining_runs(tmp_path: Path) -> None:
    candidates = {"A": known(search=grid(value=[1, 2])), "B": known(search=grid(value=[3, 4]))}
    study = Study(tmp_path, task(), candidates, seeds=(0, 1), tune_seeds=(100, 101, 102))
    assert repr(study) == f"Study('{tmp_path}', 1 tasks x 2 candidates x 2 seeds, 2 configurations each)"
    assert {(row.method, row.runs) for row in study.estimate().rows} == {("A", 8), ("B", 8)}
    assert study.estimate().seconds == 8 * 1 + 8 * 3  # of each candidate's first configuration
    assert re.search(r"\| +0.00 +\| +2.50 +\|(?s:.*)16 runs, about 32 seconds", str(study.estimate()))
    apart = Study(tmp_path / "apart", task(), candidates, seeds=(0,), tune_on=task("public"))
    assert [row.cost.seconds for row in apart.estimate().rows] == [1, 3, 1, 3]
    memory = study.estimate().rows[0].memory
    assert memory is None or memory > 10_000_000
    Known.stop_at = "made-b-1"
    with pytest.raises(KeyboardInterrupt):
        executed(study)
    assert [(row.method, row.runs) for row in study.estimate(processes=1).rows] == [("B", 1)]


def test_data_and_networks_are_on_the_runs_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def seeing(real: LabeledImages, *, factory: Any) -> LabeledImages:
        network = factory()
        seen.append((str(next(network.parameters()).device), sum(p.numel() for p in network.parameters())))
        return real

    def tested(outputs: int) -> ConvNet:
        seen.append(("tested", outputs))
        return ConvNet((1, 8, 8), outputs, width=2, depth=1)

    candidate = Condense(lambda factory: partial(seeing, factory=factory), num_networks=1, protocol=Protocol(epochs=1))
    where = Job("run", tmp_path, task(), task().load(), 0)
    split = where.split
    with run_device("meta"):
        seeing(split.train, factory=candidate.factory(where.task, split))
    threads = torch.get_num_threads()
    with run_device("cpu", threads + 1):
        assert torch.get_num_threads() == threads + 1
    assert torch.get_num_threads() == threads
    count = sum(p.numel() for p in where.task.network(split)(2).parameters())
    assert seen == [("meta", count)]
    refused(lambda: replace(candidate, tested=3), TypeError, "tested")
    write_config(torch.ones(2), replace(where, device="cuda"))
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["device"] == "cuda"
    assert torch.equal(from_config(config["recipe"], store=tmp_path / "arguments"), torch.ones(2))
    other = replace(candidate, tested=tested)
    other.run(other.build(where.task, split, {}), where)
    assert seen[1:] == [("cpu", count), ("tested", 2)]
    there = replace(where, device="cuda", keep=torch.arange(10), validation=True)
    kept, _ = where.task.pooled(split, keep=there.keep, validation=True)
    devices: list[str] = []
    monkeypatch.setattr(LabeledImages, "to", lambda self, device, *_: devices.append(str(device)) or self)
    assert candidate.run(lambda real: real, there)["images"] == len(kept)
    images(3, 0).save(tmp_path / "set.safetensors")
    assert candidate.run(lambda real: real, there)["images"] == 3
    assert (devices.count("cuda"), devices[-1]) == (2 + 3, "cpu")  # the data and the stored set, and the hash


def killed(real: LabeledImages, *, generator: Any) -> LabeledImages:
    os.kill(os.getpid(), signal.SIGKILL)
    return real


@pytest.mark.slow
def test_killed_worker_is_the_named_failure_of_its_run(tmp_path: Path) -> None:
    """All other runs finish, and those of the killed worker may be run again (defect B11)."""
    options: dict[str, Any] = {"num_networks": 1, "protocol": Protocol(epochs=1)}
    fine = Condense(lambda factory: partial(random_subset, ipc=1), **options)
    study = Study(tmp_path, task(), {"fine": fine, "bad": Condense(lambda factory: killed, **options)}, seeds=(0, 1))
    with pytest.raises(WorkerKilled, match=r"the workers of made-bad-0, made-bad-1 were killed") as caught:
        study.run(processes=2, trial=False, progress=False)
    assert "fine" not in str(caught.value)
    assert sorted(record.line["run"] for record in study.records()) == ["made-fine-0", "made-fine-1"]


def test_study_with_a_deadline_stops_after_steps_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time left, every call makes one step of a condensation, and the sets are those of a single call."""
    candidates = {"A": Condense(few(3), search=grid(lr=[0.5, 1.0]), num_networks=1, protocol=Protocol(epochs=1))}
    how = {"seeds": (0, 1), "tune_seeds": (7,)}
    whole = Study(tmp_path / "whole", task(), candidates, **how).run(trial=False, progress=False)
    steps: list[int] = []

    def counted(path: Path, found: Any) -> None:
        steps.append(int(found["step"]))
        save_state(path, found)

    monkeypatch.setattr("distillkit.study.condense_candidate.save_state", counted)
    study, calls = Study(tmp_path / "pieces", task(), candidates, **how), 0
    while (found := study.run(trial=False, progress=False, seconds=1e-6)).missing or len(found) < 2:
        calls += 1
        assert calls < 30
    assert steps == [1, 2] * 4
    assert calls == 3 * 4 - 2
    assert [r.line["hash"] for r in found] == [r.line["hash"] for r in whole]
    study.run(trial=False, progress=False, seconds=1e-6)
    assert len(steps) == 8

    plenty = Study(tmp_path / "plenty", task(), candidates, **how)
    assert not plenty.run(trial=False, progress=False, seconds=1e6).missing
    refused(lambda: study.run(seconds=0.0), ValueError, "seconds must be greater than 0")


def two_tasks(folder: Path) -> Study:
    candidates = {
        "Low": known(search=[{"value": 10.0}, {"value": 30.0}, {"value": -1.0}]),
        "High": known(search=[{"value": 70.0}, {"value": 90.0}, {"value": 80.0}]),
        "As low": known(like="Low"),
    }
    return Study(folder, [task("a"), task("b")], candidates, seeds=(1, 0), tune_seeds=(100,))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Study:
    found = two_tasks(tmp_path_factory.mktemp("whole"))
    found.run(trial=False, progress=False)
    return found


def test_interrupted_study_shows_missing_runs_and_resumes_to_equal_tables(finished: Study, tmp_path: Path) -> None:
    half = two_tasks(tmp_path / "half")
    Known.stop_at = "b-high-0"
    with pytest.raises(KeyboardInterrupt):
        half.run(trial=False, progress=False)
    found = read_records(half.out)
    assert found.missing == (("b", "High", 0), ("b", "As low", 0))
    assert [line[:3] for line in summary_table(half.out).cells] == [
        ("a", "Low", "2"), ("a", "High", "2"), ("a", "As low", "2"),
        ("b", "Low", "2"), ("b", "High", "1 of 2"), ("b", "As low", "1 of 2"),
    ]  # fmt: skip
    Known.stop_at = ""
    half.run(trial=False, progress=False)
    assert str(summary_table(half.out)) == str(summary_table(finished.out))


def test_configurations_and_differences_are_read_from_folder_and_file(finished: Study, tmp_path: Path) -> None:
    assert search_sizes(finished.out) == {"a": 3, "b": 3}
    assert [line[1:4] for line in tuning_table(finished.out, task="a").cells] == [
        ("Low", "value=30.0", "3 (1 failed)"), ("High", "value=90.0", "3"), ("As low", "as Low", "–"),
    ]  # fmt: skip
    rows = paired_differences(finished.records(), "Low").rows
    assert [row["difference"] for row in rows] == pytest.approx([0.6, 0.0] * 2)
    assert [row["seeds"] for row in rows] == [2] * 4
    kept = write_records(finished.out, tmp_path / "records.jsonl")
    assert str(tuning_table(kept)) == str(tuning_table(finished.out))
    assert str(summary_table(kept, columns=["settings.value"])) == str(finished.table(columns=["settings.value"]))
