"""Composed methods: `FedAvg` with the papers' defaults and nothing else."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from fl import ClientOptimizer, FedAvg, Phase
from fl.addons import FedProx
from fl.methods import FedLGD, FedRep, SingleImage
from tests.fl.federations import Tiny
from tests.refused import refused

PICTURE = torch.linspace(0, 1, 108).reshape(3, 6, 6)
SMALL: dict[str, Any] = {"keep": 5, "count": 10, "selection": {"clusters": 2}}
MADE: dict[type[FedAvg], Any] = {
    FedLGD: lambda *a, **o: FedLGD(*a, factory=Tiny, **o),
    FedRep: lambda *a, **o: FedRep(*a, factory=Tiny, **o),
    SingleImage: lambda *a, **o: SingleImage(PICTURE, *a, factory=Tiny, shared=SMALL, **o),
}
SET: dict[type[FedAvg], set[str]] = {FedRep: {"personal", "phases", "epochs", "steps"}}
"""The options of `FedAvg` that a composition sets itself."""

compositions = pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)


def options(kind: type[FedAvg]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(kind).parameters)


REFUSED = {"augment", "personal"}
"""Options that do not go with the add-ons of a composition, or that it uses for something else."""
VALUES: dict[str, Any] = {
    "assign": None, "initial": {}, "lr": 0.2, "momentum": 0.0,
    "optimizer": ClientOptimizer(weight_decay=0.1), "epochs": 2,
    "steps": 3, "phases": [Phase(3)], "batch": 7, "augment": lambda images, generator: images,
    "objective": torch.nn.CrossEntropyLoss(), "weights": "samples", "max_samples": 50.0, "max_update_norm": 9.0,
    "buffers": "drop", "personal": "classifier.*", "predict": "all",
}  # fmt: skip


@compositions
def test_composition_accepts_all_remaining_options_of_fedavg(kind: type[FedAvg]) -> None:
    theirs = {name for name, p in options(FedAvg).items() if p.kind is p.KEYWORD_ONLY} - {"factory"}
    assert set(VALUES) == theirs
    for name in theirs - SET.get(kind, set()) - (REFUSED if kind in (FedLGD, SingleImage) else set()):
        assert isinstance(MADE[kind](**{name: VALUES[name]}), FedAvg), name
    assert len(options(kind)) <= 20
    assert "options" in options(kind)


@compositions
def test_options_default_to_those_of_fedavg_and_unknown_ones_are_refused(kind: type[FedAvg]) -> None:
    """A default in the signature is the one in effect."""
    taken = {n: p.default for n, p in options(kind).items() if n in options(FedAvg) and p.default is not p.empty}
    given = {n: v for n, v in taken.items() if v is not None}
    assert repr(MADE[kind]()) == repr(MADE[kind](**given))
    assert [a.name for a in MADE[kind](FedProx(0.1)).addons if isinstance(a, FedProx)] == ["FedProx"]
    refused(lambda: MADE[kind](weight_decya=0.1), TypeError, "unexpected keyword argument 'weight_decya'")
    for name in SET.get(kind, set()):
        with pytest.raises(ValueError, match=f"{name} is set by {kind.__name__} itself"):
            MADE[kind](**{name: 1})
