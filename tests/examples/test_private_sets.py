from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from distillkit import LabeledImages, Normalization
from distillkit.networks import ConvNet, build
from distillkit.privacy import Ledger
from distillkit.rng import derive
from distillkit.study import Task, read_records
from distillkit.training import Protocol, train
from shared.datasets import load_private
from tests.distillkit.study.sample_records import search_sizes


def test_every_row_shows_its_ledgers_epsilon(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--preset", "smoke", "--out", str(tmp_path), "--workers", "1", "--device", "cpu"]
    script.main(words)
    records = read_records(tmp_path)
    private = {"class means, epsilon 8", "class means in 30 updates, epsilon 8"}
    private.add("image SGD, epsilon 8")
    assert {r.method for r in records} == private | {
        "distribution matching from real images", "class means without noise", "random real images", "all real images"
    }  # fmt: skip
    for record in records:
        line = record.line
        assert 0 <= line["accuracy_last"] <= 1
        assert {"cpu_seconds_condense", "cpu_seconds_test", "settings", "commit"} <= set(line)
        assert json.loads((record.folder / "config.json").read_text(encoding="utf-8"))["recipe"] is not None
        if record.method in private:
            ledger = Ledger(record.folder / "ledger.jsonl")
            assert line["epsilon"] == ledger.epsilon() <= float(record.method.split()[-1])
            assert (line["noise"], line["delta"]) == ("operating system", 1e-5)
            assert line["relation"] == "add or remove one record"
            assert line["sigma"] > 0
        else:
            assert line["epsilon"] is None
        saved = record.folder / "set.safetensors"
        assert saved.exists() == (record.method != "all real images")
        if saved.exists():
            made = LabeledImages.load(saved)
            assert made.counts().tolist() == [2] * 10
            assert made.info.get("epsilon") == line["epsilon"]
    assert search_sizes(tmp_path) == {"digits": 1}
    shown = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert shown in capsys.readouterr().out


def test_searches_are_equal_and_on_public_images_only(script: ModuleType, planned: Any) -> None:
    study = planned()
    small: dict[str, Any] = dict(study.design.candidates)
    assert study.num_configurations == 4
    assert {candidate.like for candidate in small.values()} == {None, "class means, epsilon 8"}
    assert study.design.tune_on is not None
    name, _, records = study.design.tune_on.data.args
    assert (name, records) == ("usps", script.RECORDS["digits"])
    assert study.design.tune_on.data.keywords["size"] == 16
    assert planned("--dataset", "usps").design.tune_on.data.args[0] == "mnist"
    full = planned("--dataset", "fashionmnist28", "--preset", "paper")
    assert (full.num_configurations, full.design.tune_on, len(full.design.seeds)) == (1, None, 10)
    assert {candidate.num_networks for candidate in full.design.candidates.values()} == {5}
    sgd = small["image SGD, epsilon 8"]
    network = partial(ConvNet, (1, 16, 16), 10)
    for task, records in (("digits", 1438), ("public", 1438), ("mnist", 60_000)):
        made = sgd.make(factory=network, task=Task(task, study.design.tune_on.data), lr=0.1)
        assert made.keywords["size"] == records


@pytest.mark.parametrize("draw", ["part", "records"])
def test_images_of_the_search_are_distinct(draw: str) -> None:
    split = load_private("digits", None, 300, 8, Normalization([0.1307], [0.3081]), draw)
    assert (len(split.train), len(split.validation), len(split.test)) == (300, 1138, 359)
    pixels = {tuple(x.flatten().tolist()) for x in split.train.images}
    assert sum(tuple(x.flatten().tolist()) in pixels for x in split.validation.images) < 3  # twins in the data
    assert (split.train.normalization.mean, split.train.normalization.std) == ((0.1307,), (0.3081,))


def test_without_noise_the_private_set_has_infinite_epsilon(planned: Any) -> None:
    design = planned("--preset", "smoke", "--epsilons", "1e12").design
    found, task = design.candidates, design.tasks["digits"]
    split = task.load()
    noised, clean = (
        found[name]
        .build(task, split, dict(found["class means, epsilon 1e+12"].search[0]))(split.train, generator=3)
        .images
        for name in ("class means, epsilon 1e+12", "class means without noise")
    )
    assert float((noised - clean).abs().mean()) < 0.02


def test_bfloat16_networks_train(script: ModuleType) -> None:
    images = torch.rand(6, 1, 8, 8, generator=derive(0))
    real = LabeledImages(images, torch.tensor([0, 1, 0, 1, 0, 1]), num_classes=2)

    def factory() -> torch.nn.Module:
        return script.Bfloat16((1, 8, 8), 2, width=4, depth=1)

    network = build(factory, 0)
    assert network.features(images).dtype == torch.float32
    rough, exact = network.features(images), ConvNet.features(network, images)
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.05)
    before = network(images).detach().clone()
    train(network, real, Protocol(epochs=3, lr=0.1))
    assert not torch.allclose(network(images), before, atol=0.01)
    again = factory()
    again.load_state_dict(network.state_dict())
    assert torch.equal(again(images), network(images))


def test_full_size_networks_learn_from_the_previous_pass(planned: Any) -> None:
    design = planned("--dataset", "mnist28", "--epsilons", "1", "--methods", "class_means").design
    small = dict.fromkeys(("num_networks", "first_num_networks", "steps", "first_steps", "ipc"), 1)
    small |= {"train": Protocol(epochs=1, batch=25)}
    real = LabeledImages(torch.rand(20, 1, 28, 28, generator=derive(0)), torch.arange(20) % 10, num_classes=10)
    candidate = design.candidates["class means, epsilon 1"]
    factory = partial(ConvNet, (1, 28, 28), 10, width=4, depth=3)
    make = candidate.make(factory=factory, task=design.tasks["mnist28"], **small)
    ledger = Ledger(delta=1e-5)
    made = make(real, ledger=ledger)
    assert (made.info["trained"], made.info["passes"], len(ledger.events)) == (True, 3, 4)
    assert ledger.epsilon() == pytest.approx(1.0)
    assert candidate.tested.keywords["width"] == 128
