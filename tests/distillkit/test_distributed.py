"""Two gloo processes give the set of one, refuse what they must not split, and notice a lost process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distillkit import LabeledImages
from distillkit.distributed import over_classes, over_repeats
from distillkit.sets import TiledImages
from tests.distillkit import distributed_cases as cases
from tests.refused import refused


def in_processes(folder: Path, case: str, size: int = 2) -> list[dict[str, Any]]:
    """Run a case in several processes, and return what each found; nothing for a killed process."""
    command = [sys.executable, "-m", "tests.distillkit.distributed_cases"]
    started = [
        subprocess.Popen([*command, str(rank), str(size), str(folder), case], stderr=subprocess.PIPE, encoding="utf-8")
        for rank in range(size)
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    paths = [folder / f"found-{rank}.json" for rank in range(size)]
    assert any(path.exists() for path in paths), errors
    return [json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} for path in paths]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, in_processes(folder, "equal")


CONDENSERS = cases.condensers(cases.data())


@pytest.mark.parametrize("name", CONDENSERS)
def test_two_processes_give_the_set_of_one_call(name: str, two: Any) -> None:
    torch.set_num_threads(1)
    whole = CONDENSERS[name](classes=sorted(cases.CLASSES))
    alone = over_classes(CONDENSERS[name], cases.CLASSES)
    for found in (alone, *(LabeledImages.load(two[0] / f"{name}-{rank}.safetensors") for rank in range(2))):
        rounding = 1e-6 if name == "DM, ball" else 0.0  # some processors round its logits by the number of rows
        torch.testing.assert_close(found.images, whole.images, rtol=0, atol=rounding)
        assert torch.equal(found.labels, whole.labels)
        assert found.labels.tolist() == sorted(found.labels.tolist())
        assert type(found) is type(whole)
        assert not isinstance(whole, TiledImages) or torch.allclose(found.stored, whole.stored, 0, rounding)
        assert found.info["method"] == whole.info["method"]
        assert found.info.get("publishes") == whole.info.get("publishes")


@pytest.mark.parametrize("words", cases.refused(cases.data()))
def test_call_that_depends_on_all_classes_is_refused_in_every_process(words: str, two: Any) -> None:
    call = cases.refused(cases.data())[words]
    refused(lambda: over_classes(call, cases.CLASSES), ValueError, f"over_classes cannot split this call.*{words}")
    for found in two[1]:
        assert "over_classes cannot split this call, because" in found[words]
        assert words in found[words]
    if "private" in words:
        refused(lambda: over_repeats(call, 2), ValueError, "over_repeats cannot split this call.*private")
    else:
        call(classes=[0, 1])


def test_repetitions_are_shared_and_in_order(two: Any) -> None:
    expected = [cases.accuracy(i) for i in range(5)]
    assert over_repeats(cases.accuracy, 5) == expected
    assert [found["repeats"] for found in two[1]] == [expected] * 2
    assert [found["few"] for found in two[1]] == [[{"rank": 0, "i": 0}]] * 2
    assert [found["group"] for found in two[1]] == [[0, 0], [1, 1]]
    assert all("group must contain this process" in found["other group"] for found in two[1])


def test_each_class_is_condensed_in_one_process(two: Any) -> None:
    shares = sorted(path.name for path in two[0].glob("share-*"))
    assert shares == ["share-0-0-1-3", "share-0-3", "share-1-4-5"]
    assert [found["one class"] for found in two[1]] == [9, 9]
    assert [found["classes"] for found in two[1]] == [[9, 9, 0, 9, 9, 9, 0]] * 2


def test_failed_or_late_process_is_an_error_in_the_others(two: Any) -> None:
    """At length, also with killed processes, in the slow tests below."""
    other, own = two[1]
    assert own["fail"] == "KeyError: 'no such class'"
    assert other["fail"] == f"RuntimeError: over_classes failed in process 1 of the group: {own['fail']}"
    words = "RuntimeError: over_classes lost a process, which was killed or did not answer for 0.5 s"
    assert other["sleep"].startswith(words)
    assert "function must return images of classes=" in own["all"]


@pytest.mark.slow
def test_processes_of_a_group_share_the_work(tmp_path: Path) -> None:
    first, _, third = in_processes(tmp_path, "group", 3)
    assert first == third == {"repeats": [[0, 0], [2, 1], [0, 2]], "counts": [9, 9, 0, 9, 9, 9, 0]}
    assert sorted(path.name for path in tmp_path.glob("share-*")) == ["share-0-0-1-3", "share-2-4-5"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("fail", "over_classes failed in process 1 of the group: KeyError: 'no such class'"),
        ("kill", "over_classes lost a process, which was killed or did not answer for 50 s"),
        ("sleep", "over_classes lost a process, which was killed or did not answer for 3 s"),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_lost_process_is_an_error_in_every_other_within_the_timeout(
    case: str, words: str, size: int, tmp_path: Path
) -> None:
    found = in_processes(tmp_path, case, size)
    others = [found[0], *found[2:]]
    assert [one["type"] for one in others] == ["RuntimeError"] * (size - 1)
    assert all(one["words"].startswith(words) for one in others)
    assert all(one["seconds"] < 25 for one in others)
    if case == "fail":
        assert (found[1]["type"], found[1]["words"]) == ("KeyError", "'no such class'")


def part(classes: list[int]) -> LabeledImages:
    real = cases.data()
    return real[torch.isin(real.labels, torch.tensor(classes))]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: over_classes(part, []), ValueError, "classes must be distinct"),
        (lambda: over_classes(part, [1, 1]), ValueError, "classes must be distinct"),
        (lambda: over_classes(part, ["a"]), TypeError, "classes must be"),  # type: ignore[list-item]
        (lambda: over_classes(part, 3), TypeError, "classes must be"),  # type: ignore[arg-type]
        (lambda: over_classes(3, [1]), TypeError, "classes must be options of int"),  # type: ignore[arg-type]
        (lambda: over_classes(lambda x: x, [1]), TypeError, "classes must be options of .*lambda"),
        (lambda: over_classes(lambda classes: 3, [1]), TypeError, "function must return a LabeledImages, got int"),  # type: ignore[arg-type,return-value]
        (lambda: over_classes(lambda classes: cases.data(), [1, 0]), ValueError, r"classes=\[0, 1\], got \[0, 1, 3"),
        (lambda: over_classes(part, [1], timeout=0), ValueError, "timeout must be"),
        (lambda: over_repeats(lambda i: i, 0), ValueError, "count must be"),
        (lambda: over_repeats(lambda i: torch.ones(2), 2), TypeError, "function must return JSON values"),
        (lambda: over_repeats(3, 2), TypeError, r"function is called as function\(i\)"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(call: Any, error: type[Exception], words: str) -> None:
    refused(call, error, words)


def test_label_rows_are_joined_too() -> None:
    def rows(classes: list[int]) -> LabeledImages:
        return part(classes).replace(labels=torch.eye(7)[part(classes).labels])

    assert over_classes(rows, [3, 1]).counts().tolist() == [0, 9, 0, 9, 0, 0, 0]


def test_unconnected_processes_of_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in (lambda: over_classes(part, [1]), lambda: over_repeats(int, 2)):
        refused(call, ValueError, r"call torch.distributed.init_process_group\(\) first")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert over_repeats(int, 2) == [0, 1]
    assert over_classes(part, [1]).counts().tolist() == [0, 9, 0, 0, 0, 0, 0]
