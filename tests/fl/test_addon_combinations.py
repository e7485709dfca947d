"""Every pair of add-ons, and every add-on on every base, on digits: runs, or is refused with the reason."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import fl.addons
from distillkit import LabeledImages
from distillkit.data import load
from fl import ClientData, ClientOptimizer, FedAvg, Run, simulate
from fl.averaging.addon import AddOn
from fl.methods import FedLGD, FedRep, SingleImage
from fl.task import MultiLabel
from tests.fl.federations import with_label_rows
from tests.fl.invariances import assert_same, tensors

NOISE: dict[str, Any] = {"source": "gaussian", "classes": 3, "per_class": 3}
PICTURE = torch.rand(1, 16, 16, generator=torch.Generator().manual_seed(1))
SHARED: dict[str, Any] = {"keep": 5, "count": 10, "rate": 0.5, "steps": 2, "batch": 4, "selection": {"clusters": 2}}
POOL = (255 * torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(2))).to(torch.uint8)
POOLED: dict[str, Any] = {k: v for k, v in SHARED.items() if k != "count"}
OPTIONS: dict[str, dict[str, Any]] = {
    "DPSGD": {"sigma": 1.0, "rate": 0.5, "size": 10},
    "MOON": {}, "FedSAM": {}, "VFA": {}, "VFTL": {**NOISE, "epochs": 1}, "VHL": NOISE, "NaiveVHL": NOISE,
    "Anchors": {"ipc": 1, "selected": (2,), "steps": 2}, "Condensed": {"ipc": 1, "steps": 2, "refine_steps": 1,
    "selected": (2,), "batch_real": 4, "augment": None}, "Ditto": {"steps": 1}, "FedCOG": {"start_round": 2,
    "images": 6, "steps": 2}, "FedDF": {"steps": 2, "batch": 4}, "FedDecorr": {}, "FedExP": {}, "FedGen": {"steps": 2,
    "batch": 4, "noise": 4, "hidden": 8}, "FedReg": {"iterations": 1}, "FineTune": {"steps": 1}, "FedNova": {},
    "FedProx": {}, "SCAFFOLD": {}, "FedAdagrad": {}, "FedAdam": {}, "FedAvgM": {}, "FedYogi": {},
    "SharedImage": {"image": PICTURE, **SHARED}, "SharedPool": {"pool": POOL, **POOLED},
    "LocalAccuracy": {}, "ClientDrift": {}, "RobustMean": {"attackers": 0, "rule": "median"},
}  # fmt: skip
"""A small setting of each public add-on: one without a line here fails the tests."""

SLOT = "both fill the slot '{}'"
STEPS = ("FedAdagrad", "FedAdam", "FedAvgM", "FedYogi")
ROUNDS = "needs weights from the clients in every round"
UNGUARDED = "so that one false reply could change it arbitrarily"
TOGETHER, JOINS = "reads the images of a batch together", "adds images of its own"
REFUSED: dict[tuple[str, str], str] = {
    **dict.fromkeys(itertools.combinations(STEPS, 2), SLOT.format("server_step")),
    **{(name, "SharedImage"): ROUNDS for name in ("FedExP", "FedNova", "SCAFFOLD", *STEPS)},
    **{(name, "SharedPool"): ROUNDS for name in ("FedExP", "FedNova", "SCAFFOLD", *STEPS)},
    ("Anchors", "DPSGD"): "adds records to the private set",
    ("Condensed", "DPSGD"): "a set derived from the private images",
    **{("DPSGD", name): JOINS for name in ("FedCOG", "NaiveVHL", "VHL")},
    **{("DPSGD", name): TOGETHER for name in ("FedDecorr", "FedGen", "VFA")},
    ("DPSGD", "FedReg"): SLOT.format("gradient"),
    ("DPSGD", "FedSAM"): SLOT.format("gradient"),
    ("DPSGD", "Ditto"): "trains a second model on the records",
    ("Ditto", "FineTune"): SLOT.format("personal_model"),
    ("FedDF", "FedNova"): "needs the clients' models",
    ("FedDF", "SharedImage"): SLOT.format("refine"),
    ("FedDF", "SharedPool"): SLOT.format("refine"),
    ("SharedImage", "SharedPool"): SLOT.format("refine"),
    ("FedNova", "LocalAccuracy"): "needs the clients' models",
    ("ClientDrift", "FedNova"): "needs the clients' models",
    ("FedExP", "FedNova"): SLOT.format("aggregate"),
    ("FedGen", "FedNova"): "needs the clients' models",
    ("FedNova", "FedReg"): "is not a sum of gradients",
    ("FedReg", "FedSAM"): SLOT.format("gradient"),
    **{(name, "RobustMean"): UNGUARDED for name in ("Anchors", "FedDF", "FedGen")},
    **{("RobustMean", name): UNGUARDED for name in ("SCAFFOLD", "SharedImage", "SharedPool")},
    ("FedExP", "RobustMean"): SLOT.format("aggregate"),
    ("FedNova", "RobustMean"): SLOT.format("aggregate"),
    ("FedReg", "SCAFFOLD"): "is not a sum of gradients",
    ("NaiveVHL", "VHL"): "both are VHL",
}
"""The pairs that make no sense, in alphabetical order, and a phrase of the reason; every other pair runs."""


class Net(nn.Module):
    """Network of 210 weights for ten classes of 8x8 digits."""

    def __init__(self, outputs: int, width: int = 4, norm: bool = False) -> None:
        super().__init__()
        middle = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3, 2, 1), middle, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
        self.classifier = nn.Linear(4 * width, outputs)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.body(images))


def normed(outputs: int) -> Net:
    return Net(outputs, norm=True)


TWO: dict[str, Any] = {
    "factory": {"narrow": Net, "wide": lambda outputs: Net(outputs, width=6)},
    "assign": lambda k: ("narrow", "wide")[k % 2],
}


@cache
def digits() -> LabeledImages:
    """Return 120 digits of three classes."""
    train, _ = load("digits", size=8)
    index = (train.labels < 3).nonzero().flatten()[:120]
    labels = train.labels[index]
    return LabeledImages(train.images[index], labels, num_classes=3, normalization=train.normalization)


@cache
def federation(kind: str = "even") -> tuple[ClientData, ...]:
    """Three clients with their own tests; "uneven": one class only, one image, no image, and the rest."""
    data = digits()
    if kind == "even":
        return tuple(ClientData(data[10 * k : 10 * k + 10], data[60 + k : 64 + k]) for k in range(3))
    ones = data[(data.labels == 1).nonzero().flatten()[:6]]
    return (ClientData(ones), ClientData(data[:1]), ClientData(data[:0]), ClientData(data[20:30], data[60:64]))


@cache
def addon(name: str) -> AddOn:
    return getattr(fl.addons, name)(**OPTIONS[name])


Make = Callable[..., FedAvg]


def uniform(addons: tuple[AddOn, ...]) -> dict[str, Any]:
    """Return the options that private records need, or that fix the client weights."""
    return {"weights": "uniform"} if any(a.private or a.name == "RobustMean" for a in addons) else {}


def plain(*addons: AddOn, **options: Any) -> FedAvg:
    return FedAvg(*addons, **{"factory": Net, "lr": 0.05, "steps": 2, "batch": 4, **uniform(addons), **options})


def run_two_rounds(method: FedAvg, clients: tuple[ClientData, ...] | None = None, **options: Any) -> Run:
    """Run two rounds without failures and with finite values."""
    server_data = {"proxy": digits()[90:96], "test": digits()[100:110]}
    run = simulate(
        method, clients or federation(), rounds=2, test=digits()[100:110], server_data=server_data, seed=3,
        **{"progress": False, **options},
    )  # fmt: skip
    for name, value in tensors(run.server.state).items():
        assert value.isfinite().all(), name
    for row in run.rows:
        assert row["failed"] == {}
        assert 0 <= row["accuracy"] <= 1
        assert row["loss"] is None or math.isfinite(row["loss"])
    return run


NAMES = sorted(OPTIONS)
PAIRS = list(itertools.combinations(NAMES, 2))


def test_every_public_addon_is_in_the_table() -> None:
    assert set(NAMES) == set(fl.addons.__all__)
    assert set(REFUSED) <= set(PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [p for p in PAIRS if p not in REFUSED])
def test_pair_runs(one: str, other: str) -> None:
    run_two_rounds(plain(addon(one), addon(other)))


@pytest.mark.parametrize(("one", "other"), REFUSED)
def test_invalid_pair_is_refused_when_built(one: str, other: str) -> None:
    for order in ((one, other), (other, one)):
        with pytest.raises(ValueError, match=REFUSED[one, other]) as refusal:
            plain(*map(addon, order))
        assert all(name in str(refusal.value) for name in order)


OFF: dict[str, AddOn] = {
    **{name: addon(name) for name in ("ClientDrift", "Ditto", "FineTune", "LocalAccuracy")},
    **{type(a).__name__: a for a in (
        fl.addons.Anchors(ipc=0), fl.addons.Condensed(ipc=0), fl.addons.FedAvgM(0.0), fl.addons.FedCOG(weight=0.0),
        fl.addons.FedDecorr(0.0), fl.addons.FedDF(steps=0), fl.addons.FedGen(0.0, 0.0), fl.addons.FedProx(0.0),
        fl.addons.FedSAM(0.0), fl.addons.MOON(0.0), fl.addons.NaiveVHL(cross_entropy=0.0),
        fl.addons.RobustMean(0, "trimmed"), fl.addons.VFA(0.0), fl.addons.VFTL(0),
        fl.addons.VHL(cross_entropy=0.0, calibration=0.0, contrast=0.0),
    )},
}  # fmt: skip
"""Add-ons that only measure or train beside the model, and settings that turn the others off."""


@pytest.mark.parametrize("name", OFF)
def test_addon_that_is_off_changes_no_bit_and_no_message(name: str) -> None:
    options: dict[str, Any] = {"weights": "uniform"} if name == "RobustMean" else {"factory": normed, "momentum": 0.9}
    run, base = (run_two_rounds(plain(*addons, **options), evaluate="all") for addons in ((OFF[name],), ()))
    assert_same(run, base)
    for row, other in zip(run.rows, base.rows, strict=True):
        assert [row[key] for key in ("up", "down", "loss", "accuracy_clients")] == [
            other[key] for key in ("up", "down", "loss", "accuracy_clients")
        ]


SENT: dict[str, set[str]] = {
    "Anchors": {"anchors"}, "FedExP": {"norm"}, "FedGen": {"counts", "generator", "seen"}, "FedNova": {"tau"},
    "SCAFFOLD": {"control", "drift"}, "VFA": {"means"},
}  # fmt: skip
"""The entries that add-ons send beside the model; the others send none."""
WIDER = ("NaiveVHL", "SharedImage", "SharedPool", "VFTL", "VHL")
"""Add-ons that send another model, or the model in some rounds only; their own tests count the bytes."""


@cache
def alone(name: str) -> Run:
    return run_two_rounds(plain(addon(name)))


@pytest.mark.parametrize("name", [name for name in NAMES if not addon(name).private])
def test_addons_without_hooks_change_no_bit_beside_another(name: str) -> None:
    before, after = (type(key, (AddOn,), {"data_access": "none"})() for key in ("A", "Z"))
    assert_same(run_two_rounds(plain(before, after, addon(name))), alone(name))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WIDER])
def test_addon_sends_its_own_entries_and_nothing_more(name: str) -> None:
    run, base = alone(name), run_two_rounds(plain(**uniform((addon(name),))))
    found = set()
    for row, other in zip(run.rows, base.rows, strict=True):
        for way in ("up", "down"):
            own = {key for key in row[way] if key.startswith(f"{name}.")}
            assert {key: size for key, size in row[way].items() if key not in own} == other[way]
            found |= {key.removeprefix(f"{name}.").partition(":")[0] for key in own}
    assert found == SENT.get(name, set())


# Bases: papers' compositions, and options of the core under which an add-on has to make sense.


def representation(*addons: AddOn) -> FedAvg:
    return FedRep(*addons, factory=Net, head_epochs=1, lr=0.05, momentum=0.0, batch=4, **uniform(addons))


def virtual(*addons: AddOn) -> FedAvg:
    steps = {"condense_steps": 2, "refine_steps": 1, "match_steps": 2, "selected": (2,), "lr": 0.05, "batch": 4}
    return FedLGD(*addons, factory=Net, ipc=1, anchors=1, augment=None, **steps, **uniform(addons))  # type: ignore[arg-type]


def pictured(*addons: AddOn) -> FedAvg:
    shared = {**SHARED, "rate": 1.0}
    return SingleImage(PICTURE, *addons, shared=shared, factory=Net, epochs=1, batch=4, **uniform(addons))


DECAYS = ClientOptimizer(weight_decay=1e-3, lr_decay=0.9)
ARCHITECTURE, SGD, AT_HOME = "one architecture", "optimizer='sgd'", "batch statistics stay with the clients"
BASES: dict[str, tuple[Make, dict[str, str]]] = {
    "FedAvg": (plain, {}),
    "FedAvg's defaults": (lambda *a: FedAvg(*a, factory=Net, **uniform(a)), {}),
    "with momentum": (
        lambda *a: plain(*a, momentum=0.9, weights="uniform", optimizer=DECAYS), {"FedReg": "plain SGD"}
    ),
    "with Adam": (lambda *a: plain(*a, optimizer="adam"), {"FedReg": "plain SGD", "SCAFFOLD": SGD, "Anchors": SGD}),
    "two architectures": (
        lambda *a: plain(*a, **TWO),
        dict.fromkeys(("Anchors", "ClientDrift", "FedExP", "FedGen", "RobustMean", "SCAFFOLD"), ARCHITECTURE),
    ),
    "batch norm": (
        lambda *a: plain(*a, factory=normed), {"DPSGD": "without_batch_norm", "RobustMean": "buffers='drop'"}
    ),
    "statistics that stay": (
        lambda *a: plain(*a, factory=normed, buffers="local"),
        {"DPSGD": "without_batch_norm", "FedDF": AT_HOME, "LocalAccuracy": AT_HOME, "ClientDrift": AT_HOME,
         "RobustMean": "buffers='drop'"},
    ),
    "FedRep": (
        representation,
        {"Anchors": "leave personal out", "Ditto": "leave personal out", "FedDF": "leave personal out",
         "FedGen": "leave personal out", "SharedImage": "leave personal out",
         "SharedPool": "leave personal out", "LocalAccuracy": "leave personal out",
         "ClientDrift": "leave personal out"},
    ),
    "FedLGD": (
        virtual,
        {"Anchors": "given twice", "Condensed": "given twice", "DPSGD": "adds records", "RobustMean": UNGUARDED},
    ),
    "single image": (
        pictured,
        {**dict.fromkeys(("FedDF", "SharedPool"), SLOT.format("refine")), "SharedImage": "given twice",
         "FedReg": "plain SGD", "SCAFFOLD": SGD, "Anchors": SGD, "RobustMean": UNGUARDED},
    ),
}  # fmt: skip
"""How each is built, and the add-ons that it refuses with a phrase of the reason; it runs with every other."""


def usual(base: str, name: str) -> bool:
    """Return whether a pair is always tested: the refused ones, and of the others, one of three."""
    return name in BASES[base][1] or (NAMES.index(name) + list(BASES).index(base)) % 3 == 0


@pytest.mark.parametrize(
    ("base", "name"),
    [pytest.param(b, n, marks=[] if usual(b, n) else [pytest.mark.slow]) for b in BASES for n in NAMES],
)
def test_addon_runs_on_a_base_or_is_refused(base: str, name: str) -> None:
    make, refused = BASES[base]
    if name in refused:
        with pytest.raises(ValueError, match=refused[name]) as refusal:
            make(addon(name))
        assert name in str(refusal.value)
    else:
        run_two_rounds(make(addon(name)), evaluate="drawn")


@pytest.mark.parametrize("name", NAMES)
def test_addon_runs_with_clients_of_one_class_one_image_or_none(name: str) -> None:
    run = run_two_rounds(plain(addon(name)), federation("uneven"))
    assert [row["empty"] for row in run.rows] == ([[], []] if addon(name).private else [[2], [2]])


@pytest.mark.parametrize("name", NAMES)
def test_addon_supports_multi_label_data_or_refuses_them(name: str) -> None:
    held = [with_label_rows(h.train) for h in federation()]
    how: dict[str, Any] = {"rounds": 2, "task": MultiLabel(3), "server_data": {"test": held[0]}, "progress": False}
    if addon(name).single_label:
        with pytest.raises(ValueError, match=f"{name} needs exactly one class per image"):
            simulate(plain(addon(name)), held, **how)
    else:
        run = simulate(plain(addon(name)), held, **how)
        assert not run.rows[-1]["failed"]
        assert all(t.isfinite().all() for t in tensors(run.server.state).values())
