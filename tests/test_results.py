"""Tables on pages of results equal those that the script generates from their records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attacks.statistics import clopper_pearson
from distillkit.study import Record, Records, equal_search_sizes, read_records, write_records
from tests.distillkit.study.sample_records import record, write
from tests.scripts import load_script

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SCRIPT = load_script("docs/scripts/results.py")
STUDIES = [p for p in sorted(RESULTS.glob("*.jsonl")) if "format" in json.loads(p.open(encoding="utf-8").readline())]


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_tables_of_a_page_equal_its_records(path: Path) -> None:
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert SCRIPT.TABLE.search(text)
    assert SCRIPT.filled(text, path) == text, f"run python docs/scripts/results.py {path.stem}"


def test_tables_of_a_card_equal_its_records() -> None:
    cards = {card: card.read_text(encoding="utf-8") for card in SCRIPT.cards()}
    with_tables = [card for card, text in cards.items() if SCRIPT.TABLE.search(text)]
    assert with_tables
    for card in with_tables:
        text = cards[card]
        assert text.count("<!-- table: ") == text.count(" from="), card
        assert SCRIPT.filled(text, RESULTS / "none.jsonl") == text, card


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_every_candidate_of_a_study_had_equally_many_configurations(path: Path, tmp_path: Path) -> None:
    """Records without a study have no configurations; a page may show a study of what another one chose."""
    for choice in json.loads(path.open(encoding="utf-8").readline()).get("choices", []):
        own = tmp_path / "choice.json"
        own.write_text(json.dumps(choice), encoding="utf-8")
        assert set(equal_search_sizes(own)) == set(choice["tasks"])


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


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_generating_tables_is_idempotent(records: Path) -> None:
    kinds = ["paired task=digits", "to_target accuracy=0.6", "at_equal by=bytes", "worst_clients", "summary task=other"]
    text = SCRIPT.filled(page(*kinds), records)
    assert text.count("words\n") == len(kinds)
    assert "old" not in text
    assert "+20.0" in text
    assert SCRIPT.filled(text, records) == text


def test_candidates_are_selected_and_ordered_with_published_numbers(records: Path) -> None:
    said = 'summary task=digits ways="FedDM|VHL, noise|FedAvg" hide="task|best % *" published=yes columns=bytes_up'
    found = rows(SCRIPT.filled(page(said), records))
    assert found[0] == [
        "method", "seeds", "last %", "best of the seeds' mean % *", "bytes up (MB)", "published %",
    ]  # fmt: skip
    assert [line[0] for line in found[1:]] == ["FedDM", "FedAvg", "VHL, noise"]
    assert [line[-1] for line in found[1:]] == ["72.0 ± 0.1", "–", "–"]
    assert found[3][1] == "0 of 2"


def test_one_seed_is_selected_ignoring_missing_others(records: Path) -> None:
    said = 'summary task=digits ways="FedAvg|FedDM" seeds=0'
    found = rows(SCRIPT.filled(page(said), records))
    assert [line[2] for line in found[1:]] == ["1", "1"]


def test_counts_are_summed_and_shown_with_their_interval(tmp_path: Path) -> None:
    lines = [
        Record({"task": "a", "method": way, "seed": s, "accuracy_last": None, "found": f, "of": 20, "seconds": s})
        for way, counts in (("one", (3, 4, 0)), ("two", (20, 20)))
        for s, f in enumerate(counts)
    ]
    path = write_records(Records(lines), tmp_path / "mine.jsonl")
    found = rows(SCRIPT.filled(page("rates hits=found trials=of means=seconds"), path))
    low, high = clopper_pearson(7, 60)
    assert found == [
        ["task", "method", "of", "found %", "seconds, mean"],
        ["a", "one", "60", f"11.7 ({100 * low:.1f} to {100 * high:.1f})", "1"],
        ["a", "two", "40", "100.0 (91.2 to 100.0)", "0.5"],
    ]
    assert rows(SCRIPT.filled(page('rates ways="two" hide=task'), path))[1] == ["two", "2"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("histogram", "must be one of tuning, summary"),
        ("summary colour=red", "of kind summary has no option colour"),
        ("summary ways=SCAFFOLD", "no run of SCAFFOLD"),
        ("summary seeds=7", "no run of seed 7"),
        ("tuning seeds=0", "no option seeds"),
        ("summary hide=x", "names must be columns of the table"),
    ],
)
def test_impossible_table_is_refused(records: Path, said: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SCRIPT.filled(page(said), records)


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
    text = SCRIPT.filled(page("design name=fedcog"), path)
    assert "**Claim:** On CIFAR-10 with two classes per client, FedCOG" in text
    assert "- Seeds: 300, 301, 302, 303, 304, 305, 306, 307. The pilot runs had the seeds 200, 201" in text
    shown = "Shown: FedCOG minus FedAvg is +10.0 points" if finished == 8 else f"Unfinished: {finished} of 8 seeds"
    assert f"**Result:** {shown}" in text
    assert ("95 % interval [" in text) == (finished == 8)
    assert SCRIPT.filled(text, path) == text


def test_curves_of_a_page_are_drawn(records: Path) -> None:
    said = 'curves: mine task=digits ways="FedDM|FedAvg" by=client_seconds'
    SCRIPT.draw(f"<!-- {said} -->\n![a](../pictures/other.png)", records)
    drawn = [p.name for p in (records.parents[1] / "pictures").iterdir()]
    assert drawn == ["mine.png"]


def test_study_of_a_switch_is_used_under_its_own_name(tmp_path: Path) -> None:
    write(tmp_path, [record([0.5], "FedAvg", seed) for seed in (0, 1)])
    (tmp_path / "digits-FedAvg-1" / "domains.json").write_text('{"mnist": 0.25}', encoding="utf-8")
    (tmp_path / "digits-FedAvg-0" / "judge.json").write_text('{"anchors": 0.5}', encoding="utf-8")
    found = SCRIPT.taken(f"{tmp_path}@digits, 180 rounds")
    assert [(r.task, r.method, r.seed) for r in found] == [("digits, 180 rounds", "FedAvg", seed) for seed in (0, 1)]
    assert [r.task for r in SCRIPT.taken(str(tmp_path))] == ["digits"] * 2
    assert [found[i].last("judge.anchors") for i in (0, 1)] == [0.5, None]
    assert found[1].last("accuracy_domain.mnist") == 0.25


def test_page_names_the_commits_of_its_records(tmp_path: Path) -> None:
    runs = [record(0.5, "DM", seed, commit=commit) for seed, commit in enumerate(("abc", "def", "abc"))]
    path = write_records(runs, tmp_path / "mine.jsonl")
    text = "Of <!-- commits -->old<!-- end of commits -->."
    assert SCRIPT.filled(text, path) == "Of <!-- commits -->abc, def<!-- end of commits -->."


def test_new_records_are_compared_with_earlier_ones(
    records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page_file = records.with_suffix(".md")
    page_file.write_text(page("summary task=digits"), encoding="utf-8")
    study = write(records.parents[1] / "study", [record([0.1, 0.9], "FedAvg", seed) for seed in (0, 1)])
    monkeypatch.setattr(SCRIPT, "DOCS", records.parents[1])
    monkeypatch.setattr("sys.argv", ["results.py", "mine", str(study)])
    SCRIPT.main()
    said = capsys.readouterr().out
    assert rows(said)[1] == ["digits", "FedAvg", "50.0 ± 0.0 (2)", "90.0 ± 0.0 (2)", "+40.0", "changed"]
    assert rows(said)[2][1:] == ["FedDM", "70.0 ± 0.0 (2)", "–", "–", "only before"]
    assert rows(page_file.read_text(encoding="utf-8"))[1][3] == "90.0 ± 0.0"
    assert len(read_records(records)) == 2


def test_markers_of_records_on_pages_are_closed() -> None:
    for path in RESULTS.glob("*.md"):
        assert len(re.findall("<!-- table", path.read_text(encoding="utf-8"))) == path.read_text(
            encoding="utf-8"
        ).count("<!-- end of table -->")


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
