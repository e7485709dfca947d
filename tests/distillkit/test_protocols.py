"""Schedules, optimizers and the protocols of the papers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from distillkit._optimizers import OPTIMIZERS
from distillkit.augment import DSA, ResizedCrop, ShufflePatches
from distillkit.evaluate import evaluate
from distillkit.labels import CutMix, Relabel
from distillkit.protocols import PROTOCOLS, describe_protocol
from distillkit.rng import derive
from distillkit.training import CLASSIC, Protocol
from tests.distillkit.labels.toys import convnet, stripes, trained_teacher
from tests.refused import refused


def test_protocols_have_the_published_values() -> None:
    named = ["classic", "dc", "dm", "dsa", "mtt", "datm", "idc", "sre2l", "rded", "rded-factor-2", "ddranking"]
    assert list(PROTOCOLS) == named
    seen = {name: (p.optimizer, p.schedule, p.epochs, p.lr, p.weight_decay, p.batch) for name, p in PROTOCOLS.items()}
    sgd, adamw = ("sgd", "drop"), ("adamw", "half-cosine")
    assert seen["classic"] == seen["dm"] == seen["dsa"] == seen["mtt"] == (*sgd, 1000, 0.01, 5e-4, 256)
    assert seen["dc"] == (*sgd, 300, 0.01, 5e-4, 256)
    assert seen["datm"] == (*sgd, 1000, 0.01, 5e-4, 128)
    assert seen["idc"] == ("sgd", "steps", 1000, 0.01, 5e-4, 64)
    assert seen["sre2l"] == ("adamw", "cosine", 300, 0.001, 0.01, 1024)
    assert seen["rded-factor-2"] == seen["rded"] == (*adamw, 300, 0.001, 0.01, 50)
    assert seen["ddranking"] == (*adamw, 300, 0.001, 0.01, 1024)
    assert PROTOCOLS["classic"] is CLASSIC
    relabels = dict.fromkeys(("sre2l", "rded", "rded-factor-2"), Relabel(None, 20.0, CutMix()))
    relabels["ddranking"] = Relabel(None, 1.0, CutMix())
    assert {name: p.relabel for name, p in PROTOCOLS.items() if p.relabel} == relabels
    crop, shuffled = ResizedCrop(min_scale=0.08), ShufflePatches(2, augment=ResizedCrop(min_scale=0.5))
    augment = dict.fromkeys(named, DSA()) | {"classic": None, "dc": None, "sre2l": crop, "ddranking": crop}
    augment |= {"idc": DSA("color_crop_flip_scale_rotate"), "rded": ResizedCrop(1.0), "rded-factor-2": shuffled}
    assert {name: p.augment for name, p in PROTOCOLS.items()} == augment
    assert {name: p.mix for name, p in PROTOCOLS.items() if p.mix} == {"idc": CutMix(probability=0.5)}
    assert {(p.momentum, p.lr_drop) for p in PROTOCOLS.values()} == {(0.9, 0.1), (0.9, 0.2)}
    assert [name for name, p in PROTOCOLS.items() if p.lr_drop == 0.2] == ["idc"]


def test_schedules_follow_their_formulas() -> None:
    def rates(schedule: str, epochs: int = 12, **options: float) -> list[float]:
        protocol = Protocol(epochs=epochs, lr=2.0, schedule=schedule, **options)  # type: ignore[arg-type]
        return [protocol.lr_at(epoch) for epoch in range(protocol.num_epochs)]

    assert rates("drop") == [2.0] * 8 + [0.2] * 5
    assert rates("drop", 7) == [2.0] * 5 + [0.2] * 3
    assert rates("steps", lr_drop=0.5) == [2.0] * 8 + [1.0] * 2 + [0.5] * 2
    assert rates("steps", 11, lr_drop=0.5) == [2.0] * 7 + [1.0] * 2 + [0.5] * 2
    assert rates("constant") == [2.0] * 12
    assert rates("cosine") == pytest.approx([1 + math.cos(math.pi * e / 12) for e in range(12)])
    assert rates("half-cosine") == pytest.approx([1 + math.cos(math.pi * e / 24) for e in range(12)])
    assert Protocol(lr=2.0, schedule="half-cosine").lr_at(1000) == pytest.approx(1.0)
    refused(lambda: Protocol(schedule="linear"), ValueError, "schedule")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_optimizers_equal_torchs(kind: str) -> None:
    layers = [nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours = OPTIMIZERS[kind](layers[0], momentum=0.9, weight_decay=0.3)
    parameters = list(layers[1].parameters())
    theirs: torch.optim.Optimizer
    if kind == "sgd":
        theirs = torch.optim.SGD(parameters, lr=1, momentum=0.9, weight_decay=0.3)
    else:
        free = {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}
        groups: list[dict[str, Any]] = [{"params": [p for p in parameters if p.ndim > 1]}, free]
        theirs = torch.optim.AdamW(groups, lr=1, weight_decay=0.3)
    for step in range(6):
        if step == 4 and kind == "adamw":
            ours.reset()
            theirs.state.clear()
        x, lr = torch.randn(5, 4, generator=derive(step), dtype=torch.float64), 0.1 / (step + 1)
        for layer in layers:
            layer.zero_grad()
            layer(x).pow(2).sum().backward()
        for group in theirs.param_groups:
            group["lr"] = lr
        ours.step(lr)
        theirs.step()
        for a, b in zip(layers[0].parameters(), parameters, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_evaluation_names_and_records_its_protocol() -> None:
    data = stripes(60)
    options = replace(PROTOCOLS["rded"].with_teacher(trained_teacher(), path="net.pt"), epochs=2)
    result = evaluate(data, data, convnet, num_networks=1, protocol=options)
    assert str(result).splitlines()[-1] == "protocol: rded, epochs=2"
    record = json.loads(json.dumps(result.record()))["protocol"]
    assert record["name"] == "rded, epochs=2"
    assert (record["optimizer"], record["schedule"]) == ("adamw", "half-cosine")
    assert record["relabel"]["teacher"]["path"] == "net.pt"
    assert {f.name for f in fields(Protocol)} < set(record)
    for name, protocol in PROTOCOLS.items():
        assert name in describe_protocol(protocol).split("/")
        assert json.loads(json.dumps(protocol.record()))["mix"] == (protocol.mix and repr(protocol.mix))
    assert describe_protocol(Protocol(epochs=5, lr=1.0, batch=3)) == "classic, epochs=5, lr=1.0, batch=3"
    assert describe_protocol(replace(PROTOCOLS["dm"], batch=200)) == "dm/dsa/mtt, batch=200"  # datm is as near
    refused(lambda: describe_protocol("dm"), TypeError, "^protocol must be a Protocol")  # type: ignore[arg-type]
    changed = Protocol(epochs=5, lr=1.0, batch=3, momentum=0.3)
    for relabel, told in ((None, None), (Relabel(trained_teacher()), Relabel(None))):
        text = describe_protocol(replace(changed, relabel=relabel))
        assert text == f"own, {replace(changed, relabel=told)!r}"


@pytest.mark.parametrize(("name", "near"), [("RDED", "rded"), ("rded_factor_2", "rded-factor-2"), (3, None)])
def test_unknown_protocols_are_named(name: Any, near: str | None) -> None:
    hint = "." if near is None else f"; did you mean '{near}'?"
    words = f"PROTOCOLS has no {name!r}{hint} Its names are {', '.join(PROTOCOLS)}"
    refused(lambda: PROTOCOLS[name], ValueError, f"^{re.escape(words)}$")
