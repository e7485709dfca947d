"""The script of the canary attack on labels: one row per kind of labels, with counts of the same canaries."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from distillkit import LabeledImages
from distillkit.labels import Relabel
from distillkit.networks import ConvNet
from distillkit.training import Protocol


def test_every_kind_of_labels_is_attacked_with_the_same_canaries(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from distillkit.study import read_records

    script.main(["--preset", "smoke", "--out", str(tmp_path), "--workers", "1", "--device", "cpu"])
    records = read_records(tmp_path / "digits")
    assert [r.method for r in records] == list(script.REGIMES)
    assert {r.line["canaries"] for r in records} == {20}
    assert all(0 <= r.line[key] <= 20 for r in records for key in ("taught", "control"))
    assert all(0 <= r.line["p_value"] <= 1 for r in records)
    assert "taught" in capsys.readouterr().out


@pytest.mark.parametrize("regime", ["decisions", "one row", "one row, T=4", "per view, T=4", "per view, T=20"])
def test_students_are_trained_with_the_labels_of_their_regime(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, regime: str
) -> None:
    seen: list[tuple[LabeledImages, Protocol]] = []
    monkeypatch.setattr(script, "train", lambda network, data, protocol, **_: seen.append((data, protocol)) or network)
    images = LabeledImages(torch.rand(12, 1, 8, 8), torch.arange(12) % 2, num_classes=2)
    taught = ConvNet((1, 8, 8), 2, width=4, depth=1)
    taught.train(False)
    with torch.no_grad():
        logits = taught(images.images)
    labels = logits.argmax(1)
    labels[0] = 1 - labels[0]  # the teacher is wrong on one image
    images = images.replace(labels=labels)
    network = lambda: ConvNet((1, 8, 8), 2, width=4, depth=1)  # noqa: E731
    script.train_student(taught, 0, images=images, regime=regime, protocol=Protocol(epochs=2), network=network)
    [(data, protocol)] = seen
    if regime.startswith("per view"):
        assert torch.equal(data.labels, images.labels)
        assert isinstance(protocol.relabel, Relabel)
        assert protocol.relabel.temperature == float(regime.split("=")[1])
    elif regime == "decisions":
        assert torch.equal(data.labels, logits.argmax(1))
    else:
        temperature = 4.0 if "T=4" in regime else 1.0
        assert torch.allclose(data.labels, (logits / temperature).softmax(1), atol=1e-5)
    assert protocol.num_epochs == Protocol(epochs=2).num_epochs
