"""Every private entry point lists the same assumptions in code, in its result and in the docs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distillkit.privacy
import fl
import fl.addons
import fl.methods
from distillkit import LabeledImages
from distillkit.networks import ConvNet, RandomNetworks
from distillkit.privacy import (
    ASSUMPTIONS,
    PUBLIC_INPUTS,
    Event,
    Ledger,
    Passes,
    PublicEmbedders,
    class_sums,
    condense_private,
    image_sgd,
    private_histogram,
    release,
    train_private,
)
from distillkit.privacy.validation._arguments import NEW_LEDGER_REMARK
from distillkit.rng import derive
from fl import ClientDP, FedAvg, Filtered, simulate
from fl.addons import DPSGD
from fl.methods import PrivateFedDM, SummedFedDM

ROOT = Path(__file__).parents[1]


def images(seed: int = 0) -> LabeledImages:
    pixels = torch.rand(12, 1, 8, 8, generator=derive(seed))
    return LabeledImages.from_pixels(pixels, torch.arange(12) % 3, num_classes=3)


def convnet(outputs: int = 3) -> nn.Module:
    return ConvNet((1, 8, 8), outputs, width=2, depth=1)


def standalone(ledger: Ledger | None) -> dict[str, Callable[[], Any]]:
    """Return what each function leaves in its result or in its ledger."""
    data, own, first = images(), ledger or Ledger(), Passes(first_num_networks=1)
    small: dict[str, Any] = {"networks": RandomNetworks(convnet), "ipc": 1, "steps": 1, "ledger": ledger}
    embedders = PublicEmbedders(RandomNetworks(convnet), 1, like=data)

    def released() -> Any:
        sums = class_sums(*data, embedders, num_classes=3)
        release(sums, sigma=2.0, sensitivity=1.0, ledger=own)
        return own.guarantee().info()

    def counted() -> Any:
        private_histogram(data.labels, num_classes=3, sigma=2.0, ledger=own)
        return own.guarantee().info()

    return {
        "condense_private": lambda: condense_private(data, epsilon=2.0, num_networks=1, passes=first, **small).info,
        "image_sgd": lambda: image_sgd(data, size=12, sigma=2.0, **small).info,
        "train_private": lambda: (
            train_private(convnet(), data, size=12, sigma=2.0, steps=1, ledger=ledger).guarantee().info()
        ),
        "release": released,
        "private_histogram": counted,
    }


FEDDM: dict[str, Any] = {"factory": convnet, "sigma": 2.0, "sigma_sizes": 2.0, "least": 0.0}
FEDDM |= {"num_networks": 1, "ipc": 1, "steps": 1}
RUNS = {
    "DPSGD": lambda: FedAvg(DPSGD(sigma=1.0, rate=0.5, size=12), factory=convnet, weights="uniform", steps=1),
    "PrivateFedDM": lambda: PrivateFedDM(**FEDDM, server_epochs=1),
    "SummedFedDM": lambda: SummedFedDM(**FEDDM, server_epochs=1),
    "ClientDP": lambda: Filtered(FedAvg(factory=convnet, weights="uniform"), ClientDP(1.0, 0.5, clip=0.1)),
}


def test_list_names_all_private_entry_points_and_nothing_else() -> None:
    public = [getattr(distillkit.privacy, name) for name in distillkit.privacy.__all__]
    functions = {f.__name__ for f in public if inspect.isfunction(f) and "ledger" in inspect.signature(f).parameters}
    classes = set()
    for package in (fl, fl.addons, fl.methods):
        for one in (getattr(package, name) for name in package.__all__):
            private = inspect.getattr_static(one, "private", False) if inspect.isclass(one) else False
            if isinstance(private, property):  # whether such a class is private depends on its parts
                try:
                    private = private.fget(None)  # type: ignore[misc]
                except AttributeError:
                    private = False
            if private is True:
                classes.add(one.__name__)
    assert functions | classes | {"Ledger"} == set(ASSUMPTIONS)
    assert set(standalone(None)) | set(RUNS) | {"Ledger"} == set(ASSUMPTIONS)


def test_docs_list_the_codes_assumptions() -> None:
    page = (ROOT / "docs/components/privacy.md").read_text(encoding="utf-8")
    section = page.split("## Assumptions and what you may publish")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    assert {entry: tuple(facts.split(", ")) for entry, facts, _, _ in rows} == ASSUMPTIONS
    assert all(publish.strip() and uncovered.strip() for _, _, publish, uncovered in rows)
    facts = dict(re.findall(r"^\| ([a-z ]+) \| ([^|]+) \|$", section, re.MULTILINE))
    assert {k: v for k, v in facts.items() if k != "input"} == PUBLIC_INPUTS
    link = "docs/components/privacy.md#assumptions-and-what-you-may-publish"
    assert link in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("entry", sorted(standalone(None)))
def test_result_lists_assumptions_and_the_meaning_of_a_new_ledger(entry: str) -> None:
    ledger = Ledger()
    info = standalone(ledger)[entry]()
    assert info["assumed_public"][entry] == list(ASSUMPTIONS[entry])
    assert "remarks" not in info
    assert {e.client for e in ledger.events} == {"*"}
    if entry not in ("release", "private_histogram"):
        assert standalone(None)[entry]()["remarks"] == [NEW_LEDGER_REMARK]


def test_statements_stand_beside_every_epsilon() -> None:
    for entry, facts in ASSUMPTIONS.items():
        assert {"records", "accuracies"} <= set(facts) or entry == "ClientDP"
        assert {"server data", "partition"} <= set(facts) or entry not in ("DPSGD", "PrivateFedDM", "SummedFedDM")
    assert "optimizer" in ASSUMPTIONS["train_private"]
    ledger = Ledger(budget=5.0)
    ledger.spend(Event("own mechanism", sigma=4.0))
    own = ledger.guarantee()
    assert own.info()["assumed_public"]["Ledger"] == ["records", "accuracies"]
    assert "sigma and rate of the releases were not chosen by looking at released values" in own.info()["valid_if"]
    assert str(own).endswith("holds however the releases are stopped; assumes (PUBLIC_INPUTS): records, accuracies")
    assert "assumes" not in str(Ledger().guarantee())
    assert private_histogram(torch.arange(3), num_classes=3, sigma=2.0, ledger=ledger).shape == (3,)
    assert str(ledger.guarantee()).endswith("assumes (PUBLIC_INPUTS): classes, budget, records, accuracies")


@pytest.mark.parametrize("entry", sorted(RUNS))
def test_every_row_of_a_run_lists_the_assumptions(entry: str) -> None:
    run = simulate(RUNS[entry](), [images(0), images(1)], rounds=1, progress=False, ledger=Ledger(delta=1e-3))
    assert run.rows[0]["privacy"]["assumed_public"][entry] == list(ASSUMPTIONS[entry])
