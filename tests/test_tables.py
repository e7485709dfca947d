"""Tables, numbers and curves on pages equal what the script makes from the records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distillkit.study import Record, Records, read_records, write_records
from distillkit.study._records import write_json
from tests.distillkit.study.sample_records import record, search_sizes, write
from tests.refused import refused
from tests.scripts import ROOT, load_script

DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
SCRIPT = load_script("docs/scripts/tables.py")
STUDIES = [p for p in sorted(RESULTS.glob("*.jsonl")) if SCRIPT.is_study(p)]
MARK = re.compile(r"<!-- (table|found|commits)")


@pytest.mark.parametrize(
    "path", [p for p in SCRIPT.pages(DOCS) if MARK.search(p.read_text(encoding="utf-8"))], ids=lambda p: p.stem
)
def test_tables_and_numbers_of_a_page_equal_its_records(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in ("table", "found", "commits"):
        assert len(re.findall(f"<!-- {name}\\b", text)) == text.count(f"<!-- end of {name} -->")
    assert SCRIPT.filled(text, path.stem, RESULTS) == text, "run python docs/scripts/tables.py"


def test_every_record_is_shown_on_a_page() -> None:
    shown = {path.stem for path in SCRIPT.pages(DOCS)}
    for path in SCRIPT.pages(DOCS):
        shown |= set(re.findall(r" from=(\w+)", path.read_text(encoding="utf-8")))
    assert {path.stem.removesuffix("_published") for path in RESULTS.glob("*.json*")} <= shown | {
        "secure_sums",
        "stored",
    }


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_every_candidate_of_a_study_had_equally_many_configurations(path: Path, tmp_path: Path) -> None:
    """Records without a study have no configurations; a page may show a study of what another one chose."""
    for choice in json.loads(path.open(encoding="utf-8").readline()).get("choices", []):
        own = tmp_path / "choice.json"
        write_json(own, choice)
        assert set(search_sizes(own)) == set(choice["tasks"])


def page(*kinds: str) -> str:
    return "".join(f"words\n\n<!-- table: {kind} -->\nold\n<!-- end of table -->\n" for kind in kinds)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    runs = [record([0.1, a], way, seed) for way, a in (("FedAvg", 0.5), ("FedDM", 0.7)) for seed in (0, 1)]
    missing = [("digits", "VHL, noise", 0)]
    (tmp_path / "results").mkdir()
    (tmp_path / "pictures").mkdir()
    path = write_records(
        Records([*runs, record(0.8, "DM", task="other")], missing), tmp_path / "results" / "mine.jsonl"
    )
    (tmp_path / "results" / "mine_published.json").write_text(
        json.dumps({"digits": {"FedDM": "72.0 ± 0.1"}}), encoding="utf-8"
    )
    return path


def filled(text: str, path: Path) -> str:
    return SCRIPT.filled(text, path.stem, path.parent)


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("histogram", "must be one of tuning, summary"),
        ("summary colour=red", "of kind summary has no option colour"),
        ("summary ways=SCAFFOLD", "no run of method SCAFFOLD"),
        ("summary seeds=7", "no run of seed 7"),
        ("tuning seeds=0", "no option seeds"),
        ("summary columns=x", "columns must be among those of the runs"),
        ("rows by=method columns=a={method} method=x", "no row of mine.jsonl has"),
    ],
)
def test_impossible_table_is_refused(records: Path, said: str, words: str) -> None:
    refused(lambda: filled(page(said), records), ValueError, words)


@pytest.mark.parametrize("finished", [0, 3, 8])
def test_page_shows_a_registered_design_and_its_verdict(tmp_path: Path, finished: int) -> None:
    (tmp_path / "designs").symlink_to(RESULTS / "designs")
    [*seeds] = range(300, 300 + finished)
    runs = [
        record([0.2, a + seed / 1e5], way, seed, task="cifar10-two-classes")
        for way, a in (("FedAvg", 0.2), ("FedCOG", 0.3))
        for seed in [200, *seeds]
    ]
    path = write_records([*runs, record(0.9, "FedCOG", 300, task="other")], tmp_path / "mine.jsonl")
    text = filled(page("design name=fedcog"), path)
    assert "**Claim:** On CIFAR-10 with two classes per client, FedCOG" in text
    assert "- Seeds: 300, 301, 302, 303, 304, 305, 306, 307. The pilot runs had the seeds 200, 201" in text
    shown = "Shown: FedCOG minus FedAvg is +10.0 points" if finished == 8 else f"Unfinished: {finished} of 8 seeds"
    assert f"**Result:** {shown}" in text
    assert ("95 % interval [" in text) == (finished == 8)
    assert filled(text, path) == text


def test_newer_records_of_attacks_replace_older_ones() -> None:
    def line(row: str, kind: str, tpr: float) -> dict[str, Any]:
        return {"row": row, "attack": "nearest", "kind": kind, "tpr": [tpr], "commit": "abc"}

    older = [
        line("raw", "model", 0.01),
        line("dm", "set", 0.15),
        line("feddm", "set", 0.2),
        line("feddm", "model", 0.1),
    ]
    both = SCRIPT.merged(older, [line("raw", "model", 0.02), line("feddm", "set", 0.3)])
    assert [(one["row"], one["tpr"]) for one in both] == [("raw", [0.02]), ("dm", [0.15]), ("feddm", [0.3])]


def test_study_of_a_switch_is_used_under_its_own_name(tmp_path: Path) -> None:
    write(tmp_path, [record([0.5], "FedAvg", seed) for seed in (0, 1)])
    (tmp_path / "digits-FedAvg-1" / "domains.json").write_text('{"mnist": 0.25}', encoding="utf-8")
    (tmp_path / "digits-FedAvg-0" / "judge.json").write_text('{"anchors": 0.5}', encoding="utf-8")
    found = SCRIPT.taken(f"{tmp_path}@digits, 180 rounds")
    assert [(r.task, r.method, r.seed) for r in found] == [("digits, 180 rounds", "FedAvg", seed) for seed in (0, 1)]
    assert [r.task for r in SCRIPT.taken(str(tmp_path))] == ["digits"] * 2
    assert [found[i].last("judge.anchors") for i in (0, 1)] == [0.5, None]
    assert found[1].last("accuracy_domain.mnist") == 0.25


def test_new_records_are_compared_with_earlier_ones_and_drawn(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = records.parents[1] / "docs"
    docs.mkdir()
    for name in ("results", "pictures"):
        (records.parents[1] / name).rename(docs / name)
    (docs.parent / "README.md").touch()
    own, other = docs / "results" / "mine.md", docs / "other.md"
    own.write_text(page("summary task=digits") + "<!-- curves: first task=digits by=bytes -->", encoding="utf-8")
    other.write_text("<!-- curves: second from=mine -->\n<!-- curves: third from=else -->", encoding="utf-8")
    study = write(docs.parent / "study", [record([0.1, 0.9], "FedAvg", seed) for seed in (0, 1)])
    SCRIPT.main(["mine", str(study)], docs)
    said = capsys.readouterr().out
    assert [line[3] for line in rows(said) if line[1] == "FedAvg"] == ["50.0 ± 0.0", "90.0 ± 0.0"]
    assert rows(own.read_text(encoding="utf-8"))[1] == ["FedAvg", "90.0"]
    assert len(read_records(docs / "results" / "mine.jsonl")) == 2
    assert sorted(p.stem for p in (docs / "pictures").iterdir()) == ["first", "second"]


def test_rounds_are_read_from_nested_columns_and_subtracted_by_seed() -> None:
    rounds = load_script("docs/scripts/_rounds.py")

    def run(method: str, seed: int, values: list[float | None]) -> Record:
        rows = [{"round": n, "drift": {"far": v} if v is not None else {}} for n, v in enumerate(values, 1)]
        return Record({"task": "t", "method": method, "seed": seed, "accuracy_last": 0.5}, rows)

    base, other = run("A", 0, [1.0, 2.0, 3.0]), run("B", 0, [1.5, None, 5.0])
    assert rounds._rows(other, "drift.far", 1, 9) == [{"round": 1, "drift.far": 1.5}, {"round": 3, "drift.far": 5.0}]
    assert [row["round"] for row in rounds._rows(base, "drift.far", 2, 9)] == [1, 3]
    assert [row["round"] for row in rounds._rows(base, "drift.far", 1, 2)] == [1, 2]
    rows = {(r.method, r.seed): rounds._rows(r, "drift.far", 1, 9) for r in (base, other, run("B", 1, [9.0]))}
    differences = rounds._differences(rows, "A")
    assert differences == {("B", 0): [{"round": 1, "drift.far": 0.5}, {"round": 3, "drift.far": 2.0}]}
    assert len(rounds.columns_by_round(Records([base, other]), columns="drift.far|drift.far", minus="A").axes) >= 2
    with pytest.raises(ValueError, match="no record has the column drift.near"):
        rounds.columns_by_round(Records([base]), columns="drift.near")


def test_every_case_of_inversion_has_all_seeds_and_a_clean_commit() -> None:
    lines = SCRIPT.read(RESULTS / "inversion.jsonl")
    seeds = {"images": 20, "defences": 5, "classes": 1, "clients": 6}
    for part, case in {(r["part"], r["case"]) for r in lines}:
        assert [r["seed"] for r in lines if (r["part"], r["case"]) == (part, case)] == list(range(seeds[part]))
    assert all(r["commit"] and "+" not in r["commit"] and "--cifar" in r["command"] for r in lines)


def test_record_of_scaling_has_every_case_once_from_a_clean_commit() -> None:
    bench = load_script("tests/benchmarks/bench_scaling.py")
    record = json.loads((RESULTS / "scaling.json").read_text(encoding="utf-8"))
    found = [tuple(row[name] for name in bench.Case.__annotations__) for row in record["rows"]]
    assert sorted(found) == sorted((c.part, c.clients, c.drawn, c.weights, c.seed) for c in bench.cases())
    assert all(row["commit"] and "+" not in row["commit"] and row["seconds"] > 0 for row in record["rows"])
