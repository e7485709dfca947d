"""Configurations and choices are read back, scored and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distillkit.serialization import to_config
from distillkit.study import Cost, Estimate, RecordError, read_choice, tuning_table
from distillkit.study._design import EstimateRow
from distillkit.study._records import write_json
from distillkit.study._tuning import best_configuration, score_configuration
from distillkit.study.candidate import RULES
from tests.refused import refused


def tried(*scores: float | None, **settings: list[Any]) -> dict[str, Any]:
    known = [s for s in scores if s is not None]
    chosen = [to_config({name: values[k] for name, values in settings.items()}) for k in range(len(scores))]
    tries = [{"settings": chosen[k], "score": s, "scores": [s], "runs": [str(k)]} for k, s in enumerate(scores)]
    return {"search": tries, "chosen": scores.index(max(known)) if known else 0, "like": None}


AVG = tried(0.5, 0.9, None, lr=[0.1, 0.3, 1.0])
PROX = tried(0.4, 0.5, 0.6, lr=[0.1, 0.3, 1.0], mu=[0.1, 0.1, 0.1])
LIKE = {"search": [], "chosen": None, "like": "FedAvg"}
HEADER = ("task", "method", "chosen", "configurations", "validation %", "worst %", "at the edge")


def write(folder: Path, candidates: dict[str, Any], **others: Any) -> Path:
    tasks = {"digits": candidates, "digit": candidates}
    found = {"format": "distillkit.choice/1", "rule": "last", "seeds": [100], "tasks": tasks, **others}
    write_json(folder / "choice.json", found)
    return folder


def test_table_shows_the_choice_and_the_grids_edges(tmp_path: Path) -> None:
    given = {"FedAvg": AVG, "FedProx": PROX, "Local": LIKE, "DM": tried()}
    assert "rule: last; tuning seeds: 100." in str(tuning_table(write(tmp_path, given)))
    given["FedProx"] = {**PROX, "rule": "own"}
    table = tuning_table(write(tmp_path, given))
    assert (table.header, table.left) == (HEADER, 3)
    assert table.cells[:4] == (
        ("digits", "FedAvg", "lr=0.3", "3 (1 failed)", "90.0", "50.0", "–"),
        ("digits", "FedProx", "lr=1.0", "3", "60.0", "40.0", "lr"),
        ("digits", "Local", "as FedAvg", "–", "–", "–", "–"),
        ("digits", "DM", "–", "–", "–", "–", "–"),
    )
    assert table.rows[1] == {
        "task": "digits", "method": "FedProx", "configurations": 3, "failed": 0, "like": None, "settings": "lr=1.0",
        "score": 0.6, "worst": 0.4, "edge": "lr",
    }  # fmt: skip
    assert table.rows[2] == {**dict.fromkeys(table.rows[1]), **{
        "task": "digits", "method": "Local", "configurations": 0, "failed": 0, "like": "FedAvg", "settings": "as FedAvg"
    }}  # fmt: skip
    [note] = table.notes
    assert note.endswith("never on the test set; rule: last; own for FedProx; tuning seeds: 100.")
    assert tuning_table(tmp_path, task="digit").cells == tuple(("digit", *line[1:]) for line in table.cells[:4])
    refused(lambda: tuning_table(tmp_path, task="x"), ValueError, "task must be one of 'digits', 'digit', got 'x'")
    assert read_choice(tmp_path)[1] == {"rule": "last", "seeds": [100]}


def test_two_values_are_not_marked_as_edges(tmp_path: Path) -> None:
    assert tuning_table(write(tmp_path, {"A": tried(0.1, 0.2, lr=[0.1, 0.3])})).rows[0]["edge"] is None
    assert tuning_table(write(tmp_path, {"A": tried(0.3, 0.2, 0.1, lr=[0.1, 0.3, 0.2])})).rows[0]["edge"] == "lr"
    for chosen, edge, varied in (
        ("norm=a", None, {"norm": ["a", "b", "c"]}),
        ("on=false", None, {"on": [False, True, 2]}),
        ("lr=0.3, mu=3", "lr, mu", {"lr": [0.3, 0.2, 0.1], "mu": [3, 2, 1]}),
        ("lr=0.1", None, {"lr": [0.1] * 3}),
    ):
        named = tuning_table(write(tmp_path, {"A": tried(0.3, 0.2, 0.1, **varied)})).rows[0]
        assert (named["settings"], named["edge"]) == (chosen, edge)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    refused(lambda: read_choice(tmp_path), FileNotFoundError, r"choice\.json does not exist")
    (tmp_path / "choice.json").write_text("{", encoding="utf-8")
    refused(lambda: read_choice(tmp_path), RecordError, r"choice\.json is damaged")
    for other in ("distillkit.choice/0", "distillkit.study/1"):
        write(tmp_path, {}, format=other)
        refused(lambda: tuning_table(tmp_path), RecordError, f"has the format '{other}', this version reads")
    for wrong in (0, 2, None):
        write(tmp_path, {"FedAvg": {**AVG, "chosen": wrong}})
        with pytest.raises(RecordError, match=f"configuration {wrong} of FedAvg on digits is not the best"):
            tuning_table(tmp_path)


@pytest.mark.parametrize("values", [(0.2, 0.6, 0.7), (0.0, 0.8, 0.7)])
@pytest.mark.parametrize("rule", RULES)
def test_configuration_with_a_failed_seed_has_no_score(rule: str, values: tuple[float, ...]) -> None:
    """It would otherwise be compared on the seeds on which it happens to work."""
    column = RULES[rule]
    good = [{"settings": {}, "run": str(k), column: value} for k, value in enumerate(values)]
    failed = {"settings": {}, "run": "3", "error": "diverged"}
    assert score_configuration(good, rule)["score"] == pytest.approx(0.5)
    for lines in ([*good, failed], [failed, *good], [failed]):
        found = score_configuration(lines, rule)
        assert found["score"] is None
        assert found["scores"] == [line.get(column) for line in lines]
        assert (found["errors"], found["runs"]) == (["diverged"], [line["run"] for line in lines])
    scores = [score_configuration(lines, rule) for lines in ([failed, *good[2:]], good, good[:1])]
    assert best_configuration(scores, "here") == 1


def test_first_of_equal_configurations_is_chosen() -> None:
    scores = [None, 0.2, 0.7, 0.7, None, 0.7, 0.1]
    assert best_configuration([{"score": score} for score in scores], "here") == 2
    with pytest.raises(ValueError, match="here has no configuration with a score: diverged"):
        best_configuration([{"score": None, "errors": ["diverged"]}, {"score": None}], "here")
    for errors, said in ((["diverged", "burnt"], "diverged"), ([], "there was nothing to test")):
        search = [{"score": None}, {"score": None, "errors": errors}]
        refused(lambda: best_configuration(search, "here"), ValueError, f"here has no .* with a score: {said}$")  # noqa: B023


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_estimate_divides_the_time_among_the_processes(processes: int) -> None:
    first = EstimateRow("digits", "A", 3, Cost(20.0, 1_500_000, 20_000), 250_000_000)
    found = Estimate([first, EstimateRow("digits", "B", 5, Cost(60.0), None)], processes)
    assert found.seconds == pytest.approx(360 / processes)
    ends = {1: "6.0 minutes.", 2: "3.0 minutes in 2 processes.", 3: "2.0 minutes in 3 processes."}[processes]
    header, _, *lines, total = str(found).splitlines()
    names = ["task, method", "runs", "seconds a run", "MB up", "MB down", "memory, MB"]
    assert [cell.strip() for cell in header.split("|")[1:-1]] == names
    assert total == f"8 runs, about {ends}"
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]
    assert cells == [["3", "20.0", "1.50", "0.02", "250"], ["5", "60.0", "–", "–", "–"]]


@pytest.mark.parametrize(("seconds", "said"), [
    (89.0, "89 seconds"), (90.0, "1.5 minutes"), (5399.0, "90.0 minutes"), (5400.0, "1.5 hours"),
    (129_599.0, "36.0 hours"), (129_600.0, "1.5 days"),
])  # fmt: skip
def test_durations_have_a_unit_of_their_size(seconds: float, said: str) -> None:
    assert str(Estimate([EstimateRow("a", "b", 1, Cost(seconds), None)])).endswith(f"about {said}.")
