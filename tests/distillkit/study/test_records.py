"""Records are read as they were written, and unreadable ones are named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillkit.serialization import to_config
from distillkit.study import Record, RecordError, Records, read_choice, read_records, summary_table, write_records
from distillkit.study._records import _checksum, group_records, write_json
from tests.distillkit.study.sample_records import record, write
from tests.refused import refused

THREE = [record([0.1, 0.2], seed=seed) for seed in (1, 0)] + [record(0.5, "DM"), record([None, None], "Local")]


def test_records_are_read_as_written_by_name(tmp_path: Path) -> None:
    found = read_records(write(tmp_path, THREE))
    assert [r.line["run"] for r in found] == ["digits-DM-0", "digits-FedAvg-0", "digits-FedAvg-1", "digits-Local-0"]
    by_name = {r.line["run"]: r for r in THREE}
    for r in found:
        assert (r.line, [*r.rows]) == (by_name[r.line["run"]].line, by_name[r.line["run"]].rows)
        assert r.folder == tmp_path / r.line["run"]
    assert found.missing == ()
    more = Records([*found, record(0.5, "DM", task="other")], (("other", "Local", 0),))
    assert repr(more) == "<5 finished runs of 4 candidates on 2 tasks; 1 missing>"


METHODS = ("Local", "FedAvg", "DM")
PLAN = {
    "format": "distillkit.study/1",
    "runs": [[task, method, seed] for task in ("digits", "other") for method in METHODS for seed in (1, 0)],
}


def test_order_is_the_studys_and_missing_runs_are_known(tmp_path: Path) -> None:
    found = read_records(write(tmp_path / "planned", THREE, PLAN))
    assert [(r.method, r.seed) for r in found] == [("Local", 0), ("FedAvg", 1), ("FedAvg", 0), ("DM", 0)]
    assert len(found.missing) == 12 - 4
    assert ("digits", "DM", 1) in found.missing
    assert {(g.task, g.method): g.seeds for g in group_records(tmp_path / "planned")} == {
        ("digits", "Local"): "1 of 2", ("digits", "FedAvg"): "2", ("digits", "DM"): "1 of 2",
        **{("other", candidate): "0 of 2" for candidate in METHODS},
    }  # fmt: skip
    tmp_path /= "unplanned"
    found = read_records(write(tmp_path, [record(0.5, "A"), *THREE], PLAN))
    assert [(r.method, r.seed) for r in found] == [("Local", 0), ("FedAvg", 1), ("FedAvg", 0), ("DM", 0), ("A", 0)]
    assert len(found.missing) == 12 - 4
    assert ("digits", "DM", 1) in found.missing
    assert {(g.task, g.method): g.seeds for g in group_records(tmp_path)} == {
        ("digits", "Local"): "1 of 2", ("digits", "FedAvg"): "2", ("digits", "DM"): "1 of 2",
        ("digits", "A"): "1 of 2", **{("other", candidate): "0 of 2" for candidate in METHODS},
    }  # fmt: skip


@pytest.mark.parametrize("content", ['{"format": "distillkit.study/0"}', "[]", "{"])
def test_study_of_another_format_is_refused(tmp_path: Path, content: str) -> None:
    (write(tmp_path, THREE) / "study.json").write_text(content, encoding="utf-8")
    with pytest.raises(RecordError, match=r"study\.json (is damaged|has the format .*, this version reads)"):
        read_records(tmp_path)


def test_files_of_unfinished_runs_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, THREE)
    write(tmp_path / "tuning", [record([0.9], "FedAvg", 5)])
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "history.jsonl").write_text('{"round": 1}\n', encoding="utf-8")
    (tmp_path / "summary.json").write_text("[]", encoding="utf-8")
    assert len(read_records(tmp_path)) == len(THREE)


def test_folder_without_runs_is_refused_and_its_content_named(tmp_path: Path) -> None:
    refused(lambda: read_records(tmp_path), FileNotFoundError, r"no subfolder holds a summary\.json$")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "history.jsonl").touch()
    refused(lambda: read_records(tmp_path), FileNotFoundError, "1 runs have begun")
    (tmp_path / "summary.json").touch()
    refused(lambda: read_records(tmp_path), FileNotFoundError, r"a summary\.json; 1 runs have begun, so run the s")
    refused(lambda: read_records(tmp_path / "nowhere"), FileNotFoundError, "nowhere does not exist")


def test_folder_of_an_older_script_is_refused_by_name(tmp_path: Path) -> None:
    """They list their runs in one file; the lines name a dataset and an accuracy_mean."""
    (tmp_path / "summary.json").write_bytes(b'[{"run": "a", "dataset": "digits", "accuracy_mean": 0.5}]')
    refused(lambda: read_records(tmp_path), FileNotFoundError, r"summary\.json is of one run or of another program")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "summary.json").write_bytes(b'{"run": "a", "dataset": "digits", "method": "DM", "seed": 0}')
    refused(lambda: read_records(tmp_path), RecordError, r"a/summary\.json is damaged: .* another program wrote it")
    write_json(tmp_path / "a" / "summary.json", {"run": "a", "method": "DM", "seed": 0})
    refused(lambda: read_records(tmp_path), RecordError, r"a/summary\.json: line lacks task, accuracy_last; it has run")


@pytest.mark.parametrize("file", ["summary.json", "choice.json", "study.json", "records.jsonl"])
def test_no_changed_byte_of_a_record_is_read(file: str, tmp_path: Path) -> None:
    """Numbers of a table could be altered in silence."""
    write(tmp_path / "s", THREE, PLAN)
    write_json(tmp_path / "s" / "choice.json", {"rule": "last", "seeds": [9], "tasks": {}}, "choice")
    write_records(tmp_path / "s", tmp_path / "records.jsonl")
    path = next(tmp_path.rglob(file))
    read = (lambda: read_records(path)) if file == "records.jsonl" else (lambda: read_records(tmp_path / "s"))
    assert len(read()) == len(THREE)
    whole = path.read_bytes()
    for place in range(0, len(whole) - 1, 11):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        refused(read, RecordError, file.replace(".", r"\."))
    if file == "records.jsonl":
        path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
        refused(read, RecordError, "does not match its checksum")


def test_two_runs_that_differ_only_in_the_split_are_refused(tmp_path: Path) -> None:
    """Averaging would treat them as seeds."""
    a, b = (record([0.1], split=split, run=split) for split in ("iid", "Dirichlet 0.1"))
    with pytest.raises(RecordError, match=r"Dirichlet 0\.1 and .*iid both have .* differ in run, split"):
        read_records(write(tmp_path / "splits", [b, a]))
    refused(lambda: group_records([a, b]), RecordError, "and differ in run, split")
    tmp_path /= "other"
    a, b = record([0.1], run="iid"), record([0.1], run="Dirichlet 0.1", split=0.1)
    with pytest.raises(RecordError, match=r"Dirichlet 0\.1 and .*iid both have .* differ in run\. Read"):
        read_records(write(tmp_path, [b, a]))
    said = r"seeds: {} both have \('digits', 'FedAvg', 0\), and differ in {}\. Read them separately"
    refused(lambda: group_records([a, b]), RecordError, said.format("iid and Dirichlet 0.1", "run, split"))
    lines = [{name: a.line[name] for name in ("task", "method", "seed", "accuracy_last")}] * 2
    refused(lambda: group_records([*map(Record, lines)]), RecordError, said.format("a record and a record", "nothing"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("summary.json", '{"run": "x"', r"digits-DM-0/summary\.json is damaged"),
        ("summary.json", "\x80", r"digits-DM-0/summary\.json is damaged"),
        ("summary.json", "[]", r"summary\.json is damaged: it must hold an object, got list"),
        ("history.jsonl", '{"round": 1}\n{"rou', r"history\.jsonl is damaged: line 2"),
        ("history.jsonl", '{"round": 1}\n{"round": 3}\n', r"history\.jsonl is damaged: line 2 is of round 3, want 2"),
        ("history.jsonl", "\x80\n", r"history\.jsonl is damaged: line 1"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    write(tmp_path, THREE)
    (tmp_path / "digits-DM-0" / name).write_bytes(content.encode("latin1"))
    refused(lambda: read_records(tmp_path), RecordError, said)


def test_history_shorter_than_its_summary_is_refused(tmp_path: Path) -> None:
    write(tmp_path, THREE)
    (tmp_path / "digits-FedAvg-0" / "history.jsonl").unlink()
    refused(lambda: read_records(tmp_path), RecordError, r"has 2 rounds, but .*history\.jsonl has 0")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"accuracy_last": 91.5}, r"accuracy_last must be a fraction in \[0, 1\] or null, got 91\.5"),
        ({"accuracy_last": float("nan")}, "got nan"),
        ({"accuracy_last": True}, "got True"),
        ({"accuracy_last": -0.1}, "got -0.1"),
        ({"seed": "0"}, "seed must be of type int, got '0'"),
        ({"seed": True}, "seed must be of type int"),
        ({"task": None}, "task must be of type str"),
        ({"method": 3}, "method must be of type str"),
    ],
)
def test_line_of_another_type_is_refused(facts: dict[str, Any], said: str) -> None:
    refused(lambda: Record({**record(0.5).line, **facts}), RecordError, said)
    refused(lambda: Record({}), RecordError, "a record: line lacks task, method, seed, accuracy_last; it has nothing")


def test_values_are_looked_up_in_the_line_then_in_the_last_round() -> None:
    one = record([0.4, 0.8], bytes_up=None, error=None, **{"a.b": 3})
    assert (one.last("bytes_up"), one.failed) == (1_000_000, False)
    assert [one.last(name) for name in ("accuracy_best", "loss", "accuracy_clients.worst10")] == [0.8, 1.0, 0.4]
    assert [one.last(name) for name in ("a.b", "nothing", "accuracy.mean", "epsilon")] == [3, None, None, None]


def test_settings_are_shown_as_given() -> None:
    """A line stores them as serialized."""
    given = {"lr": 0.1, "loops": (10, 2), "shared": {"rate": 0.2, "tuple": [3]}, "name": "a"}
    by_name = record(0.5, settings={name: to_config(value) for name, value in given.items()})
    one = record(0.5, settings=to_config(given))
    assert by_name.last("settings") == one.last("settings")
    assert one.last("settings") == {"lr": 0.1, "loops": [10, 2], "shared": {"rate": 0.2, "tuple": [3]}, "name": "a"}
    assert [one.last(f"settings.{name}") for name in ("lr", "loops", "shared.rate")] == [0.1, [10, 2], 0.2]


@pytest.mark.parametrize("wrong", [None, 3, [3], {"a": 1}, [record(0.5), "x"]])
def test_other_objects_are_refused(wrong: Any) -> None:
    last = wrong[-1] if isinstance(wrong, list) else wrong
    refused(lambda: group_records(wrong), TypeError, f"records must be a list of .*got {type(last).__name__}")
    refused(lambda: group_records([]), ValueError, "records must hold at least one run")


# One file.


def test_file_of_records_gives_the_same_tables_as_the_folder(tmp_path: Path) -> None:
    """Without the reasons of failures, which name clients."""
    folder = write(tmp_path / "study", THREE, PLAN)
    found = read_records(folder)
    path = write_records(found, tmp_path / "records.jsonl")
    again = read_records(path)
    assert again.missing == found.missing
    assert [r.line for r in again] == [r.line for r in found]
    assert str(summary_table(path)) == str(summary_table(folder))
    assert "failed" in found[1].rows[0]
    for mine, theirs in zip(again, found, strict=True):
        assert [*mine.rows] == [{k: v for k, v in row.items() if k != "failed"} for row in theirs.rows]
    assert read_choice(path)[0] == []


@pytest.mark.parametrize("rules", [("last", "last"), ("last", "late")])
def test_file_of_records_contains_the_choices_of_its_studies(rules: tuple[str, str], tmp_path: Path) -> None:
    studies = [write(tmp_path / name, [record([0.5], task=name)]) for name in ("a", "b")]
    for k, (study, rule) in enumerate(zip(studies, rules)):
        result = {"search": [{"settings": {"lr": 0.1}, "score": 0.5}], "chosen": 0, "like": None}
        choice = {"rule": rule, "tasks": {study.name: {"A": result}}, "late_rounds": 1 + 2 * k}
        if rules == ("last", "last"):
            write_json(study / "choice.json", {**choice, "format": "distillkit.choice/1", "seeds": [9]})
        else:
            write_json(study / "choice.json", {**choice, "seeds": [8, 9 + k]}, "choice")
    first = write_records(studies[0], tmp_path / "a.jsonl")
    path = write_records(read_records(first) + read_records(studies[1]), tmp_path / "both.jsonl")
    tuned, facts = read_choice(path)
    assert [(t.task, t.method, t.chosen) for t in tuned] == [("a", "A", 0), ("b", "A", 0)]
    both = {"rule": "last", "seeds": [9]} if rules == ("last", "last") else {"rule": "last, late", "seeds": [8, 9, 10]}
    assert facts == {**both, "late_rounds": [1, 3]}
    assert read_choice(first)[1]["late_rounds"] == 1
    write_records(Records([record(0.5)], choices=[{"format": "distillkit.choice/0"}]), path)
    refused(lambda: read_choice(path), RecordError, "both.jsonl has the format 'distillkit.choice/0'")


def test_runs_missing_in_one_study_may_be_in_another() -> None:
    a = Records([record(0.5, seed=0)], [("digits", "FedAvg", 1), ("digits", "FedAvg", 2)])
    both = a + Records([record(0.5, seed=1)], [("digits", "FedAvg", 2)])
    assert [r.seed for r in both] == [0, 1]
    assert both.missing == (("digits", "FedAvg", 2),)
    more = [record(0.5, seed=2)]
    assert (a + more).missing == (("digits", "FedAvg", 1),)


def test_unreadable_files_of_records_are_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for content in ("", "{", '{"format": "distillkit.records/0"}', "[]", '{"format": "distillkit.records/1"}\n{}'):
        path.write_text(content, encoding="utf-8")
        refused(lambda: read_records(path), RecordError, r"records\.jsonl (is damaged|has the format)")
    mixed, said = [THREE[0], record([0.3], seed=1)], "different tasks, methods or seeds"
    refused(lambda: write_records(mixed, path), RecordError, said)
    line = {"line": dict(THREE[0].line), "rows": []}
    for head, lines in (({}, [line] * 2), ({}, [{}]), ({}, [{**line, "line": 3}]), ({"missing": [3]}, [line])):
        content = {"format": "distillkit.records/1", "missing": [], "choices": [], **head}
        text = "".join(f"{json.dumps(one)}\n" for one in lines)
        path.write_text(f"{json.dumps({**content, 'checksum': _checksum(content, text)})}\n{text}", encoding="utf-8")
        refused(lambda: read_records(path), RecordError, said if len(lines) > 1 else r"records\.jsonl is damaged: ")
    for wrong in (None, [3]):
        with pytest.raises(TypeError, match="records must be"):
            write_records(wrong, path)  # type: ignore[arg-type]
    refused(lambda: write_records(THREE, 3), TypeError, "path must be a path")


@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=6), st.integers(1, 8))
def test_late_is_the_mean_over_the_last_evaluated_rounds(accuracies: list[float | None], rounds: int) -> None:
    runs = Records([record(accuracies)], [("digits", "FedDM", 0)], [{"rule": "last"}])
    found = runs.late(rounds)
    tested = [a for a in accuracies[-rounds:] if a is not None]
    assert found[0].line["accuracy_late"] == (pytest.approx(sum(tested) / len(tested)) if tested else None)
    assert (found.missing, found.choices) == (runs.missing, runs.choices)
    assert "accuracy_late" not in runs[0].line


def test_late_without_rounds_is_none_and_zero_rounds_are_refused() -> None:
    runs = Records([record(0.5)])
    assert runs.late(1)[0].line["accuracy_late"] is None
    assert runs[0].last("accuracy_late") is None
    refused(lambda: runs.late(0), ValueError, "rounds must be at least 1")


@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=7))
def test_column_accuracy_late_is_the_second_half_unless_the_summary_says_otherwise(accuracies: list[Any]) -> None:
    run = record(accuracies)
    half = [a for t, a in enumerate(accuracies, 1) if t > len(accuracies) // 2 and a is not None]
    expected = None if not half else pytest.approx(sum(half) / len(half))
    assert run.last("accuracy_late") == Records([run]).late()[0].line["accuracy_late"] == expected
    assert Records([run]).late(1)[0].last("accuracy_late") == accuracies[-1]
    failed = record(accuracies, error="it diverged")
    assert failed.last("accuracy_late") is None
    assert Records([failed]).late(1)[0].line["accuracy_late"] is None


def test_late_rounds_of_a_study_are_those_of_its_records(tmp_path: Path) -> None:
    plan = {"format": "distillkit.study/1", "runs": [["digits", "FedAvg", 0]]}
    folders = [
        write(tmp_path / str(k), [record([0.1, 0.2, 0.3])], {**plan, **late})
        for k, late in enumerate(({}, {"late_rounds": None}, {"late_rounds": 1}, {"late_rounds": 3}))
    ]
    kept = [write_records(folder, tmp_path / f"{folder.name}.jsonl") for folder in folders]
    for paths in (folders, kept):
        assert [read_records(path)[0].last("accuracy_late") for path in paths] == pytest.approx([0.25, 0.25, 0.3, 0.2])


def test_equal_file_keeps_its_time(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    os.utime(path, (1, 1))
    write_json(path, {"a": 1})
    assert path.stat().st_mtime == 1
    write_json(path, {"a": 2})
    assert path.stat().st_mtime > 1
