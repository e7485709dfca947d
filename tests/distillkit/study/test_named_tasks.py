"""Tasks by name: JSON round trip, allocation as in their papers, and error messages for missing data."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from distillkit import LabeledImages
from distillkit.data import Split, StoredSplit
from distillkit.normalization import IDENTITY
from distillkit.serialization import from_config, to_config
from distillkit.study import TASK_NAMES, named_task
from tests.refused import refused


@pytest.mark.parametrize("name", TASK_NAMES)
def test_every_task_is_rebuilt_from_its_json(name: str, tmp_path: Path) -> None:
    task = named_task(name, root=tmp_path)
    said = json.loads(json.dumps(to_config(task)))
    assert to_config(from_config(said)) == said


@pytest.mark.parametrize("name", sorted({*TASK_NAMES} - {"digits", "synthdigitslike"}))
def test_every_task_names_what_is_missing(name: str, tmp_path: Path) -> None:
    refused(lambda: named_task(name, root=tmp_path).load(), (FileNotFoundError, ValueError), str(tmp_path))


@pytest.mark.parametrize("name", TASK_NAMES)
def test_tasks_have_the_documented_options(name: str) -> None:
    sizes = {"digits": 16, "digits-domains": 28, "cifar10c": 28, "retina": 96, "flair": 64}
    sizes |= {"celeba": 84, "leaf-celeba": 84}
    people = ("femnist", "celeba", "leaf-celeba", "flair")
    task, own = named_task(name, root="r"), named_task(name, root="r", size=20, participation=0.5)
    assert isinstance(task.data, partial)
    assert isinstance(own.data, partial)
    assert (task.participation, task.evaluate) == ((10, "none") if name in people else (1.0, None))
    assert (task.data.keywords.get("size"), own.data.keywords["size"]) == (sizes.get(name), 20)
    assert own.participation == 0.5
    root = task.data.args[0] if name == "retina" else task.data.keywords["root"]
    assert root == ("r/retina_balanced" if name == "retina" else "r")
    natural = name in (*people, "digits-domains", "cifar10c", "retina")
    assert task.name == (name if natural else f"{name}-dirichlet0.1-10")
    stored = get_type_hints(task.data.func).get("return") is StoredSplit
    assert stored == (name in ("tinyimagenet", "celeba", "leaf-celeba", "flair"))
    said = json.loads(json.dumps(to_config(task)))
    assert to_config(from_config(said)) == said
    assert task.factory_options == ({"width": 32, "depth": 2} if name in ("digits", "usps") else {})
    sources = (["mnist", "svhn", "usps", "synthdigits", "mnistm"],)
    assert name != "digits-domains" or task.data.args == sources
    assert task.data.keywords.get("channels") == (3 if name == "digits-domains" else None)
    assert task.data.keywords.get("normalization") == (IDENTITY if name == "cifar10c" else None)


def test_digits_are_allocated() -> None:
    task = named_task("digits", clients=4, alpha=0.5, rounds=3)
    split = task.load()
    dealt = task.assign(split, 0)
    assert (task.name, task.rounds, len(dealt.clients)) == ("digits-dirichlet0.5-4", 3, 4)
    assert sum(p.numel() for p in task.network(split)(10).parameters()) == 14_826


def test_corrupted_images_are_allocated_as_in_fedlgd() -> None:
    labels, domains = torch.arange(2800) % 2, torch.arange(2800) // 1400
    pixels = torch.rand(2800, 1, 1, 1)
    columns = {"domain": domains}
    train = LabeledImages(pixels, labels, num_classes=2, normalization=IDENTITY, columns=columns)
    split = Split(train, train[:2], ("a", "b"))
    dealt = named_task("cifar10c", root="data").assign(split, 0)
    assert len(dealt.clients) == 2 * 3
    for part in dealt.owners:
        assert len(domains[part].unique()) == 1
        assert bool((labels[part].bincount() >= 100).all())


@pytest.mark.parametrize("name", ["tinyimagenet", "celeba", "leaf-celeba", "flair"])
def test_large_data_are_read_from_disk(name: str, tmp_path: Path) -> None:
    images = named_task(name, root=tmp_path).data
    assert isinstance(images, partial)
    assert get_type_hints(images.func)["return"] is StoredSplit


def test_invalid_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTILLKIT_DATA", raising=False)
    refused(lambda: named_task("imagenet"), ValueError, "name must be one of")
    refused(lambda: named_task("retina"), ValueError, "root must name the folder of retina")
    refused(lambda: named_task("digits", epochs=3), TypeError, "epochs")
    for option in ("clients", "size", "alpha"):
        refused(lambda option=option: named_task("digits", **{option: 0}), ValueError, f"{option} must be ")  # type: ignore[misc]
