"""Every method, add-on and filter is rebuilt from its config.json."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fl
from distillkit import serialization
from distillkit.augment import DSA
from distillkit.serialization import from_config, to_config
from fl import Classification, ClientDP, FedAvg, Filtered, Keyring, MultiLabel, Phase, Registry, SecureSums, simulate
from fl._components import options_by_name
from fl.addons import SCAFFOLD, Condensed, FedProx
from fl.averaging import AddOn
from fl.filters import Adaptive
from fl.methods import FedProto
from tests.fl.every_method import METHODS
from tests.fl.federations import Tiny, federation, images
from tests.fl.invariances import assert_same
from tests.fl.test_addon_combinations import BASES, NAMES, OPTIONS, Net, plain
from tests.fl.test_record_keys import built_in

TRUST = ("tests.fl.federations", "tests.fl.test_addon_combinations", __name__)
MADE: dict[str, Any] = {
    **METHODS,
    "options": lambda: FedAvg(
        SCAFFOLD(), factory=Tiny, momentum=0.9, augment=DSA(), phases=[Phase(1, train="classifier.*"), Phase(2)],
        objective=torch.nn.functional.cross_entropy,
    ),
    "adaptive": lambda: Filtered(
        FedAvg(FedProx(), factory=Tiny, weights="uniform"),
        ClientDP(sigma=1.0, rate=0.5, clip=1.0, adaptive=Adaptive()),
    ),
    "secure": lambda: Filtered(
        FedAvg(factory=Tiny),
        SecureSums(
            Registry({k: f"{k:064x}" for k in range(3)}), keyring=Keyring("keys"), threshold=2,
            bounds={FedAvg.update: 8.0},
        ),
    ),
    "condensed": lambda: FedProto(factory=Tiny, condensed=Condensed(refine_steps=0)),
}  # fmt: skip
LAMBDAS = ("two architectures",)
"""Bases of the grid whose networks are lambdas, which have no name."""


def assert_rebuilt(value: Any, store: Path) -> Any:
    said = json.loads(json.dumps(to_config(value, store=store)))
    again = from_config(said, store=store, trust=TRUST)
    assert options_by_name(again) == options_by_name(value)
    assert type(again) is type(value)
    assert to_config(again, store=store) == said
    return again


@pytest.mark.parametrize("name", NAMES)
def test_every_addon_is_rebuilt(name: str, tmp_path: Path) -> None:
    addon = getattr(fl.addons, name)(**OPTIONS[name])
    again = assert_rebuilt(addon, tmp_path)
    for option, value in OPTIONS[name].items():
        assert not isinstance(value, Tensor) or torch.equal(getattr(again, option), getattr(addon, option))


@pytest.mark.parametrize("name", MADE)
def test_every_method_is_rebuilt(name: str, tmp_path: Path) -> None:
    method = MADE[name]()
    assert_rebuilt(method, tmp_path)
    if not isinstance(method, FedAvg | Filtered):  # those leave out defaults
        options = inspect.signature(type(method)).parameters.keys() - {"factory", "assign", "options"}
        assert options <= options_by_name(method)["with"].keys()


@pytest.mark.parametrize("base", [b for b in BASES if b not in LAMBDAS])
def test_every_base_is_rebuilt_with_an_addon(base: str, tmp_path: Path) -> None:
    make, refused = BASES[base]
    name = next(n for n in ("MOON", "FedProx", "LocalAccuracy") if n not in refused)
    assert_rebuilt(make(getattr(fl.addons, name)(**OPTIONS[name])), tmp_path)


@pytest.mark.parametrize("base", LAMBDAS)
def test_network_as_lambda_is_refused_with_its_location(base: str) -> None:
    with pytest.raises(serialization.SerializationError, match=r"^value.factory\['wide'\] is a function"):
        to_config(BASES[base][0]())


def test_all_classes_were_rebuilt() -> None:
    known = {type(m).__name__ for make in MADE.values() for m in [make()]} | set(NAMES)
    known |= {"ClientDP", "SecureSums", "SetQuality", "FedAvg"}
    public = {k.__name__ for k in built_in() if not k.__name__.startswith("_")}
    assert public - known == {"Shared", "ServerAdaptive", "Nova"} & public


def test_clips_by_entry_are_rebuilt_with_their_entries(tmp_path: Path) -> None:
    clip = {FedAvg.update: 1.0, FedAvg.buffers: 0.5}
    filtered = Filtered(plain(weights="uniform"), ClientDP(sigma=1.0, rate=0.5, clip=clip, adaptive=Adaptive()))
    again = assert_rebuilt(filtered, tmp_path)
    assert again.filters[0].clip == clip
    assert all(one is other for one, other in zip(again.filters[0].clip, clip, strict=True))


def test_initial_weights_and_phases_are_rebuilt(tmp_path: Path) -> None:
    initial = Net(3).state_dict()
    phases = [Phase(1, train="classifier.*"), Phase(2)]
    again = assert_rebuilt(FedAvg(factory=Net, initial=initial, phases=phases), tmp_path)
    assert all(torch.equal(again.networks.initial[n], t) for n, t in initial.items())
    assert len(list(tmp_path.iterdir())) == 1


class Damped(AddOn):
    """A user's add-on without `arguments`, which is allowed."""

    def __init__(self, by: float = 0.5) -> None:
        self.by = by

    def correct_gradient(self, step: Any, grads: Any) -> None:
        for grad in grads.values():
            grad *= self.by


# In a run's folder.

HOW: dict[str, Any] = {"rounds": 1, "test": images(9, 7), "progress": False}


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_config_of_a_run_describes_its_method_and_task(tmp_path: Path) -> None:
    method = FedAvg(Damped(0.25), factory=Tiny, initial=Tiny(3).state_dict(), steps=2)
    run = simulate(method, federation(), out=tmp_path, seed=4, **HOW)
    said = config(tmp_path)
    assert said["format"] == "distillkit.run/2"
    assert "recipe_missing" not in said
    again = from_config(said["recipe"], store=tmp_path / "arguments", trust=TRUST)
    assert from_config(said["labels"]) == Classification(3)
    assert_same(simulate(again, federation(), seed=said["seed"], **HOW), run)


def test_config_contains_everything_a_repetition_needs(tmp_path: Path) -> None:
    held = [s.replace(labels=torch.nn.functional.one_hot(s.labels, 3).float()) for s in federation()]
    method = Filtered(FedAvg(factory=Tiny, weights="uniform"), ClientDP(sigma=1.0, rate=0.5, clip=1.0))
    simulate(FedAvg(factory=Tiny), held, rounds=1, task=MultiLabel(3), out=tmp_path / "rows", participation=3,
             min_replies=2, progress=False)  # fmt: skip
    said = config(tmp_path / "rows")
    assert from_config(said["labels"]) == MultiLabel(3)
    assert (said["participation"], said["min_replies"]) == (3, 2)
    simulate(method, federation(), rounds=1, secret=3, out=tmp_path / "private",
             evaluate="none", server_threads=2, progress=False)  # fmt: skip
    said = config(tmp_path / "private")
    assert said["privacy"] == {"delta": 1e-5, "secret": 3, "disjoint": said["privacy"]["disjoint"]}
    assert said["budget"] is None
    averaging, noise = said["method"]["args"]  # by name, defaults too
    assert (averaging["object"], averaging["with"]["lr"], averaging["with"]["weights"]) == ("fl:FedAvg", 0.1, "uniform")
    assert (noise["object"], noise["with"]["sigma"], noise["with"]["rate"]) == ("fl:ClientDP", 1.0, 0.5)
    assert (said["threads"]["server"], said["rounds"], said["evaluate"]) == (2, 1, "none")


def test_config_explains_why_a_method_cannot_be_rebuilt(tmp_path: Path) -> None:
    simulate(FedAvg(factory=lambda outputs: Tiny(outputs)), federation(), out=tmp_path, **HOW)
    said = config(tmp_path)
    assert said["recipe"] is None
    assert said["recipe_missing"].startswith("method.factory is a function ")
    assert not (tmp_path / "arguments").exists()


class Forgets(AddOn):
    """Copies lose its option, so its config would build another method."""

    def __init__(self, by: float = 0.5) -> None:
        self.by = by

    def init_arguments(self) -> Any:
        return (), {}

    def arguments(self) -> Any:
        return (self.by,), {}


def test_config_that_builds_another_method_is_rejected(tmp_path: Path) -> None:
    simulate(FedAvg(Forgets(0.25), factory=Tiny), federation(), out=tmp_path, **HOW)
    assert config(tmp_path)["recipe"] is None
    assert re.search(r"builds another one, FedAvg\(Forgets\(0.5\)", config(tmp_path)["recipe_missing"])


def test_folder_of_another_format_does_not_resume(tmp_path: Path) -> None:
    method = FedAvg(factory=Tiny, steps=1)
    simulate(method, federation(), out=tmp_path, **HOW)
    for other in ("distillkit.run/1", "distillkit.run/3", None):
        (tmp_path / "config.json").write_text(json.dumps({**config(tmp_path), "format": other}), encoding="utf-8")
        with pytest.raises(fl.CheckpointError, match=f"format {other!r}, which this version does not know"):
            simulate(method, federation(), out=tmp_path, resume=True, **{**HOW, "rounds": 2})
