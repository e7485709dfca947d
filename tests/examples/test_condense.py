from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from distillkit import LabeledImages
from distillkit.condense import herding
from distillkit.rng import derive
from distillkit.study import Condense, read_records
from tests.distillkit.study.sample_records import search_sizes


def own_data(path: Path) -> Path:
    g = derive(0)
    arrays = {}
    for part, n in (("train", 40), ("test", 20)):
        labels = torch.arange(n) % 2
        pixels = torch.randint(0, 100, (n, 8, 8), generator=g) + 120 * labels.view(-1, 1, 1)
        arrays |= {f"{part}_images": pixels.to(torch.uint8).numpy(), f"{part}_labels": labels.numpy()}
    np.savez(path, **arrays)
    return path


def test_all_methods_on_user_data_write_their_results(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--preset", "smoke", "--dataset", str(own_data(tmp_path / "my images.npz")), "--epochs", "8", "--ipc", "2"]
    words += ["--out", str(out), "--workers", "1", "--device", "cpu"]
    script.main(words)
    records = read_records(out)
    assert [r.method for r in records] == ["random", *script.SEARCH]
    for record in records:
        assert 0 <= record.line["accuracy_last"] <= 1
        assert {"cpu_seconds_condense", "cpu_seconds_test", "settings", "commit", "hash"} <= set(record.line)
        assert LabeledImages.load(record.folder / "set.safetensors").counts().tolist() == [2, 2]
        assert (record.folder / "grid.png").read_bytes().startswith(b"\x89PNG")
        config = json.loads((record.folder / "config.json").read_text(encoding="utf-8"))
        assert config["recipe"] is not None
    assert search_sizes(out) == {"my-images": 1}
    assert (out / "sets.png").exists()
    shown = (out / "table.md").read_text(encoding="utf-8")
    assert shown in capsys.readouterr().out
    script.main([*words, "--methods", "random", "dm", "--longer", "9", "25"])
    again = read_records(out)
    assert [r.line for r in again[:6]] == [r.line for r in records]
    assert [(r.method, len(r.line["accuracies"])) for r in again[6:]] == [("random, 9 x 25", 1), ("dm, 9 x 25", 1)]
    dm, longer = (
        LabeledImages.load(r.folder / "set.safetensors").images for r in again if r.method in ("dm", "dm, 9 x 25")
    )
    assert torch.equal(dm, longer)


def test_presets_have_equal_searches_and_paper_is_as_published(script: ModuleType) -> None:
    def candidates(*words: str) -> dict[str, Condense]:
        return script.candidates(script.arguments(["--dataset", "digits", *words]))

    assert {len(candidate.search) for name, candidate in candidates().items() if name != "random"} == {2}
    assert {name: candidate.like for name, candidate in candidates("--methods", "random", "dc").items()} == {
        "random": "dc",
        "dc": None,
    }
    assert candidates("--methods", "random")["random"].search == [{}]
    published = candidates("--preset", "paper")
    assert [dict(published[name].search[0])["lr"] for name in ("dm", "dc", "dsa")] == [1.0, 0.1, 0.1]
    paper = script.arguments(["--preset", "paper", "--dataset", "digits"])
    assert (paper.steps, paper.iterations, paper.loops, paper.init) == (20_000, 1000, (10, 50), "noise")
    assert paper.nets * len(paper.seeds) == 100
    assert script.arguments(["--dataset", "digits", "--ipc", "50"]).ipc == 50


def test_embedding_is_trained_once_per_task(script: ModuleType) -> None:
    real = LabeledImages(torch.rand(20, 1, 8, 8, generator=derive(0)), torch.arange(20) % 2, num_classes=2)
    made: list[torch.nn.Module] = []

    class Features(torch.nn.Sequential):
        def features(self, images: torch.Tensor) -> torch.Tensor:
            return self[0](images)

    def factory() -> torch.nn.Module:
        made.append(Features(torch.nn.Flatten(), torch.nn.Linear(64, 2)))
        return made[-1]

    options = {"choose": herding, "factory": factory, "ipc": 2, "images": 10, "epochs": 1}
    first, again = (script.embedded(real, **options) for _ in range(2))
    assert len(made) == 1
    assert torch.equal(first.images, again.images)
    script.embedded(real[:10], **options)  # other images, as of a try
    assert len(made) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--steps", "-3"], ["argument --steps: must be at least 1, got -3"]),
        (["--ipc", "0"], ["argument --ipc: must be at least 1, got 0"]),
        (["--dataset", "nowhere"], ["--dataset nowhere: name must be one of digits"]),
        (["--data", "mine"], ["--data has no effect with --dataset digits"]),
    ],
)
def test_invalid_command_is_reported_in_one_line(
    script: ModuleType, argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        script.main(["--preset", "smoke", *argv])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert [word for word in words if word not in told] == []


def test_unreadable_data_end_the_program_without_a_traceback(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pets").mkdir()
    (tmp_path / "notes.txt").write_text("no arrays", encoding="utf-8")
    for given, more, words in (
        (tmp_path / "pets", [], "has no sub-folders"),
        (tmp_path / "notes.txt", [], "is damaged or not an .npz"),
        ("mnist", ["--data", str(tmp_path)], "mnist is not complete in"),
    ):
        with pytest.raises(SystemExit):
            script.main(["--preset", "smoke", "--dataset", str(given), *more, "--out", str(tmp_path / "out")])
        said = capsys.readouterr().err
        assert f"--dataset {given}: " in said
        assert words in said
