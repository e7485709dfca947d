from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from distillkit import LabeledImages
from distillkit.networks import RandomNetworks
from distillkit.privacy import Ledger, PublicMaps, class_sums
from distillkit.rng import derive
from distillkit.training import Protocol, train
from tests.scripts import load_script

FAST = ["--preset", "smoke", "--set", "test.images=50", "records=200"]


@pytest.fixture(scope="module")
def private_sets() -> ModuleType:
    return load_script("examples/private_sets.py")


def test_every_row_of_the_table_and_nothing_run_twice(
    private_sets: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*FAST, "image_sgd.rate=0.1", "--epsilons", "8", "1", "--out", str(tmp_path)]
    records = private_sets.main(argv)
    assert [r["method"] for r in records] == ["class_means", *private_sets.METHODS]
    assert json.loads((tmp_path / "summary.json").read_text()) == records
    for record in records:
        assert 0 <= record["accuracy"] <= 1
        assert {"seconds_make", "seconds_test", "command", "commit", "settings"} <= set(record)
        private = record["method"] in ("class_means", "image_sgd")
        if private:
            ledger = Ledger(tmp_path / record["run"] / "ledger.jsonl")
            assert record["epsilon"] == ledger.epsilon() <= record["epsilon_wanted"]
            assert (record["noise"], record["delta"]) == ("operating system", 1e-5)
            assert not any(event.seeded for event in ledger.events)
        else:
            assert record["epsilon"] is record["noise"] is None
        if record["method"] != "all":
            made = LabeledImages.load(tmp_path / record["run"] / "set.safetensors")
            assert made.counts().tolist() == [2] * 10
            assert made.info.get("epsilon") == record["epsilon"]
    shown = (tmp_path / "table.md").read_text()
    assert shown in capsys.readouterr().out
    assert private_sets.main(argv) == records
    with pytest.raises(SystemExit, match="other settings"):
        private_sets.main([*argv, "--set", "ipc=3"])


def test_without_noise_it_is_the_private_set_at_an_epsilon_without_end(
    private_sets: ModuleType, tmp_path: Path
) -> None:
    argv = [*FAST, "--methods", "class_means", "class_means_clean", "--epsilons", "1e12", "--out", str(tmp_path)]
    noised, clean = (
        LabeledImages.load(tmp_path / r["run"] / "set.safetensors").images for r in private_sets.main(argv)
    )
    assert float((noised - clean).abs().mean()) < 0.02


def test_a_set_that_is_there_is_only_tested_again(private_sets: ModuleType, tmp_path: Path) -> None:
    argv = [*FAST, "--methods", "class_means", "--out", str(tmp_path)]
    (record,) = private_sets.main(argv)
    folder = tmp_path / record["run"]
    (folder / "record.json").unlink()
    (again,) = private_sets.main([*argv, "--resume"])
    assert {**again, "seconds_test": 0, "command": 0} == {**record, "seconds_test": 0, "command": 0}
    (folder / "record.json").unlink()
    (charged_again,) = private_sets.main(argv)
    assert charged_again["epsilon"] > 8.001


def test_settings(private_sets: ModuleType) -> None:
    options = private_sets.arguments(["--preset", "paper", "--set", "dm.lr=2", "class_means.draws=7"])
    assert (options.settings["dm"]["lr"], options.settings["class_means"]["draws"]) == (2, 7)
    assert private_sets.DATASETS["digits"]["class_means"]["draws"] != 7
    assert options.seeds == list(range(10))
    with pytest.raises(SystemExit, match="there is only"):
        private_sets.arguments(["--set", "dm.size=2"])


def test_bfloat16_networks_move_a_class_sum_by_one_record_of_length_one_and_train(private_sets: ModuleType) -> None:
    settings = private_sets.changed(private_sets.DATASETS["fashionmnist28"], {"width": 4, "depth": 1})
    images = torch.rand(6, 1, 8, 8, generator=derive(0))
    real = LabeledImages(images, torch.tensor([0, 1, 0, 1, 0, 1]), num_classes=2)
    network = private_sets.Maker(settings, real).network()
    assert network.features(images).dtype == torch.float32
    rough, exact = network.features(images), network.network.features(images)
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.05)
    maps = PublicMaps(RandomNetworks(private_sets.Maker(settings, real).network), 1, like=real)
    with_all, without = (class_sums(*part, maps, num_classes=2) for part in (real, real[1:]))
    torch.testing.assert_close((with_all - without).norm(dim=2), torch.tensor([[1.0, 0.0]]).double(), atol=1e-5, rtol=0)
    before = network(images).detach().clone()
    train(network, real, Protocol(epochs=3, lr=0.1))
    assert not torch.allclose(network(images), before, atol=0.01)
    again = private_sets.Maker(settings, real).network()
    again.load_state_dict(network.state_dict())
    assert torch.equal(again(images), network(images))


def test_networks_of_the_full_size_learn_from_the_pass_before(private_sets: ModuleType, tmp_path: Path) -> None:
    small = ["draws=1", "first_draws=1", "steps=1", "first_steps=1", "train.epochs=1"]
    settings = private_sets.changed(
        private_sets.DATASETS["mnist28"],
        {**{f"class_means.{key}": int(value) for key, value in (s.split("=") for s in small)}, "width": 4, "ipc": 1},
    )
    real = LabeledImages(torch.rand(20, 1, 28, 28, generator=derive(0)), torch.arange(20) % 10, num_classes=10)
    ledger = Ledger(delta=1e-5)
    made = private_sets.Maker(settings, real).make("class_means", 1.0, 0, ledger)
    assert (made.info["trained"], made.info["passes"], len(ledger.events)) == (True, 3, 4)
    assert ledger.epsilon() == pytest.approx(1.0)


def test_updates_of_the_images_are_counted_over_the_passes(private_sets: ModuleType) -> None:
    full = private_sets.DATASETS["mnist28"]
    own = full["class_means"]
    counted = [private_sets.updates({"method": m, "settings": full}) for m in ("class_means", "class_means_clean")]
    assert counted == [own["first_steps"] + (own["passes"] - 1) * own["steps"]] * 2
    assert private_sets.updates({"method": "dm", "settings": full}) == full["dm"]["steps"]
    assert private_sets.updates({"method": "random", "settings": full}) == 0
