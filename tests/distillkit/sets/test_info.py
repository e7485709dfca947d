"""A set's guarantee, what it publishes and where it comes from, after every operation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from distillkit import LabeledImages, Normalization
from distillkit.condense import (
    distribution_matching,
    fit_to_gradient,
    gradient_matching,
    herding,
    initial_images,
    k_center,
    random_subset,
    stitch,
)
from distillkit.data import Split, load_domains, mnist_m_like
from distillkit.networks import FixedNetwork
from distillkit.privacy import Guarantee, Ledger, PrivacyError, condense_private, image_sgd, train_private
from distillkit.rng import derive
from distillkit.sets import TiledImages, Tiles, as_set
from distillkit.sets._class_index import with_class_labels
from distillkit.sets._info import GUARANTEE, combined_info, derived_info, inherited_info
from tests.refused import refused

RELATION = "add or remove one record"
STATED: dict[str, Any] = {
    "epsilon": 2.0, "delta": 1e-5, "relation": RELATION, "accountant": "pld", "valid_if": "planned", "budget": 3.0,
    "remarks": ["tuned"], "assumed_public": {"condense_private": ["init"]},
}  # fmt: skip
SAFE = {"method": "class_means", "publishes": "means", "derived": "class_means", "sigma": 1.0, **STATED}


def make(info: dict[str, Any] | None = None, seed: int = 0, n: int = 8) -> LabeledImages:
    images = torch.rand(n, 1, 8, 8, generator=derive(seed))
    return LabeledImages(images, torch.arange(n) % 2, num_classes=2, info=SAFE if info is None else info)


def rows(data: LabeledImages) -> torch.Tensor:
    return nn.functional.one_hot(data.labels, 2).float()


def guarantee(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in GUARANTEE if name in info}


AGAIN = ((0.4,), (0.3,))
MEASURED = Normalization(*AGAIN, measured=True)
CNN = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
matched = partial(distribution_matching, networks=FixedNetwork(CNN), steps=1, progress=False)


def assigned(data: LabeledImages, **parts: Any) -> LabeledImages:
    for name, value in parts.items():
        setattr(data, name, value)
    return data


KEPT: dict[str, Callable[[LabeledImages], LabeledImages]] = {
    "slice": lambda s: s[2:],
    "mask": lambda s: s[s.labels == 1],
    "to": lambda s: s.to("cpu", torch.float64),
    "renormalize": lambda s: s.renormalize(Normalization((0.5,), (0.5,))),
    "replace nothing": lambda s: s.replace(images=s.images, labels=s.labels, columns=dict(s.columns)),
    "drop columns": lambda s: s.replace(columns={}),
    "names": lambda s: s.replace(class_names=("a", "b"), num_classes=2),
    "own info": lambda s: s.replace(images=s.images * 2, info=s.info),
    "same measured space": lambda s: s._with(normalization=MEASURED).renormalize(Normalization(*AGAIN, measured=True)),
    "join alone": lambda s: LabeledImages.concatenate([s]),
    "pack": lambda s: Tiles(2).pack(s),
    "wrap": lambda s: TiledImages.wrap(s, Tiles(2)),
    "tiled slice": lambda s: Tiles(2).pack(s)[:2],
    "tiled to": lambda s: Tiles(2).pack(s).to("cpu"),
    "parts": lambda s: LabeledImages.from_parts(*s.parts()),
    "subset": lambda s: as_set(Subset(Subset(s, range(6)), [0, 1])),
    "loader": lambda s: as_set(DataLoader(s, batch_size=3)),
    "loader of a subset": lambda s: LabeledImages.from_dataset(DataLoader(Subset(s, [1, 2]))),
    "one dataset": lambda s: as_set(ConcatDataset([s])),
    "hard labels": lambda s: with_class_labels(s.replace(labels=rows(s), info=s.info)),
    "random subset": lambda s: random_subset(s, ipc=2),
    "random tiles": lambda s: random_subset(s, ipc=1, parametrize=Tiles(2)),
    "herding of pixels": lambda s: herding(s, ipc=2),
    "k-center of pixels": lambda s: k_center(s, ipc=2),
}
SOME = "some of the joined images have no guarantee"
NETWORKS = "condensation with networks of unknown origin"
OWN = "a measured normalization of unknown origin"
ENDED: list[tuple[str, Callable[[LabeledImages], LabeledImages]]] = [
    ("images of unknown origin", lambda s: s.replace(images=torch.rand(len(s), 1, 8, 8))),
    ("images of unknown origin", lambda s: assigned(s, images=torch.rand(len(s), 1, 8, 8))),
    ("images of unknown origin", lambda s: Tiles(2).pack(s).with_stored(torch.rand(2, 1, 8, 8))),
    ("stored of unknown origin", lambda s: assigned(Tiles(2).pack(s), stored=torch.rand(2, 1, 8, 8))),
    ("labels of unknown origin", lambda s: s.replace(labels=1 - s.labels)),
    ("labels of unknown origin", lambda s: assigned(s, labels=1 - s.labels)),
    ("the column 'y' of unknown origin", lambda s: s.replace(columns={"y": torch.rand(len(s), 2)})),
    ("the column 'y' of unknown origin", lambda s: assigned(s, columns={"y": torch.rand(len(s), 2)})),
    ("the column 'y' of unknown origin", lambda s: s._with(columns={"y": s.labels, "z": s.labels}).replace(
        columns=MappingProxyType({"y": 1 - s.labels, "z": s.labels}))),
    (OWN, lambda s: s.replace(normalization=MEASURED)),
    (OWN, lambda s: s._with(normalization=Normalization((0.5,), (0.3,), measured=True)).renormalize(MEASURED)),
    (OWN, lambda s: assigned(s, normalization=MEASURED)),
    (f"images, labels, the column 'y', {OWN}", lambda s: s.replace(
        images=s.images * 2, labels=1 - s.labels, columns={"y": s.labels}, normalization=MEASURED)),
    (SOME, lambda s: LabeledImages.concatenate([s, make({}, 1)])),
    (SOME, lambda s: LabeledImages.concatenate([make({"dataset": "x"}, 1), s])),
    (SOME, lambda s: as_set(DataLoader(ConcatDataset([s, Subset(make({}, 1), [0])])))),
    (SOME, lambda s: load_domains({"a": Split(s, make({}, 1), ("x", "y"))}).train),
    ("photos of unknown origin",
     lambda s: mnist_m_like(Split(s, s, ("x", "y")), photos=[np.zeros((9, 9, 3), np.uint8)]).train),
    (f"{SOME}; photos of unknown origin", lambda s: mnist_m_like(Split(make({}, 1), s, ("x", "y"))).train),
    ("seeded", lambda s: LabeledImages.concatenate([s, make({"epsilon": None, "reason": "seeded"}, 1)])),
    ("selection by a network of unknown origin", lambda s: herding(s, ipc=2, network=CNN)),
    (NETWORKS, lambda s: matched(s, ipc=1)),
    (f"{SOME}; {NETWORKS}", lambda s: matched(s, init=make({}, 1))),
    (f"{SOME}; {NETWORKS}", lambda s: gradient_matching(
        make({}, 1), networks=FixedNetwork(CNN), init=s, iterations=1, progress=False)),
    ("a target gradient of unknown origin", lambda s: fit_to_gradient(
        CNN, s, [p.detach() for p in CNN.parameters()], steps=1, progress=False)),
]  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_computed_from_the_set_alone_keeps_its_guarantee(name: str) -> None:
    found = KEPT[name](make().replace(columns={"index": torch.arange(8)}, info=SAFE))
    assert guarantee(found.info) == STATED
    assert list(make().replace(columns={"b": torch.ones(8), "a": torch.ones(8)}).columns) == ["b", "a"]
    words = r"cannot be changed in place; assign data\.columns = \{\*\*data\.columns, 'x': \.\.\.\}$"
    refused(lambda: found.columns.__setitem__("x", found.labels), TypeError, words)  # type: ignore[attr-defined]
    assert set(found.info["derived"].split("; ")) >= {"class_means"}
    assert "means" in found.info["publishes"]
    assert "epsilon=2.0, delta=1e-05" in repr(found)


@pytest.mark.parametrize(("reason", "call"), ENDED)
def test_content_of_other_origin_ends_the_guarantee_with_the_reason(reason: str, call: Any, tmp_path: Path) -> None:
    found = call(make())
    wanted = {"epsilon": None, "reason": f"{reason} (before: epsilon 2)", "remarks": ["tuned"]}
    assert guarantee(found.info) == wanted
    assert "means" in found.info["publishes"]
    assert f"no guarantee: {found.info['reason']}" in repr(found)
    assert "epsilon=" not in repr(found)
    for file in ("set.npz", "set.safetensors"):
        path = tmp_path / file
        loaded = LabeledImages.load(found.export(path) if path.suffix == ".npz" else found.save(path))
        assert loaded.info == found.info


SUMS = "epsilon and delta are sums over joined sets; a ledger that paid for all of them states less"
BASIC = {"accountant": "basic composition", "remarks": [SUMS]}
FREE: dict[str, Any] = {"epsilon": 0.0}
SURE: dict[str, Any] = {"epsilon": 1.23456, "delta": 1e-5, "relation": RELATION, "valid_if": "planned", "budget": 3.0}
JOINED: list[tuple[list[dict[str, Any]], str, dict[str, Any] | str]] = [
    ([{}, {"method": "x"}], "photos", {}),
    ([{"method": "x", **STATED}], "", STATED),
    ([{"method": "x", **STATED, "epsilon": 0.0}], "", STATED | {"epsilon": 0.0}),
    ([FREE, FREE], "", {"epsilon": 0.0, **BASIC}),
    ([SURE, SURE | {"epsilon": 2, "delta": 2e-5, "budget": 4.0}], "", {
        "epsilon": 3.23456, "delta": pytest.approx(3e-5), "relation": RELATION, "valid_if": "planned", "budget": 7.0,
        **BASIC,
    }),
    ([FREE, SURE], "", {"epsilon": 1.23456, "delta": 1e-5, "relation": RELATION, "valid_if": "planned", **BASIC}),
    ([FREE | {"delta": 2e-5}, SURE], "",
     {"epsilon": 1.23456, "delta": pytest.approx(3e-5), "relation": RELATION, "valid_if": "planned", **BASIC}),
    ([SURE | {"epsilon": math.inf}, FREE], "",
     {"epsilon": math.inf, "delta": 1e-5, "relation": RELATION, "valid_if": "planned", **BASIC}),
    ([STATED, STATED | {"remarks": ["seen"], "epsilon": 0.5, "assumed_public": {"a": ["net"]}}, STATED | {
        "delta": 3e-5, "budget": 0.0, "assumed_public": {"condense_private": ["factory", "init"]}}], "", {
        "epsilon": 4.5, "delta": pytest.approx(5e-5), "relation": RELATION, "valid_if": "planned", "budget": 6.0,
        "assumed_public": {"condense_private": ["init", "factory"], "a": ["net"]},
        **BASIC, "remarks": ["tuned", "seen", SUMS],
    }),
    ([SURE, {}], "", "some of the joined images have no guarantee (before: epsilon 1.235)"),
    ([SURE], "photos", "photos (before: epsilon 1.235)"),
    ([{"epsilon": None, "reason": "seeded"}, {"epsilon": True, "reason": ""}, {}], "photos",
     "seeded; no reason is recorded; some of the joined images have no guarantee; photos"),
    ([SURE, SURE | {"relation": "other"}, FREE, SURE], "",
     "the joined sets have guarantees of different relations (before: epsilon 1.235, 0)"),
    ([SURE, {"epsilon": 1, "relation": RELATION}], "",
     "the joined sets have guarantees of different relations (before: epsilon 1.235, 1)"),
    ([SURE, {"epsilon": 1}], "",
     "the joined sets have guarantees of different relations (before: epsilon 1.235, 1)"),
    ([{"epsilon": None, "reason": "seeded"}] * 2, "", "seeded"),
    ([SURE, FREE | {"relation": "other"}], "",
     "the joined sets have guarantees of different relations (before: epsilon 1.235, 0)"),
]  # fmt: skip


@pytest.mark.parametrize(("infos", "unknown", "wanted"), JOINED)
def test_joined_guarantees_by_hand(infos: list[dict[str, Any]], unknown: str, wanted: Any) -> None:
    found = inherited_info(infos, unknown)
    assert found == ({"epsilon": None, "reason": wanted} if wanted is str(wanted) else wanted)
    if len(infos) > 2 and found["epsilon"]:  # joined one after the other
        for some in ([inherited_info(infos[:2]), infos[2]], [infos[0], inherited_info(infos[1:])]):
            joined = inherited_info(some)
            assert sorted(joined.pop("remarks")) == sorted(wanted["remarks"])
            assert joined == {name: value for name, value in wanted.items() if name != "remarks"}


def test_image_that_occurs_twice_is_marked() -> None:
    data = make({})
    items: Any = Subset(TensorDataset(*data), [0, 1, 0])
    own: Any = type("Own", (ConcatDataset,), {"__getitem__": lambda self, i: (-data[i][0], data[i][1])})
    assert torch.equal(as_set(own([data])).images, -data.images)  # as the subclass gives them
    sources = items, ConcatDataset([TensorDataset(*data)] * 2), ConcatDataset([Subset(items, [0]), items])
    read = [as_set(source, class_names=("a", "b")) for source in sources]
    for twice in (data[[-1, 7]], data[torch.tensor([0, 0]).int()], LabeledImages.concatenate([data, data]), *read):
        assert twice.info == {"derived": "repeated images"}
    assert make({"derived": "k"})[[0, 0]].info == {"derived": "k; repeated images"}
    turned, other = data.replace(images=data.images.mT), make({"a": 1}, 1)
    joined = [[data[:0], data[:0], data], [data, turned], [data, make({}, 2)]]
    for once in (data[[-1, 6]], data[data.labels == 1], *map(LabeledImages.concatenate, joined)):
        assert once.info == {}
    both = {"provenance": [{}, {"a": 1}]}
    assert LabeledImages.concatenate([data, other[:0]]).info == both
    assert LabeledImages.concatenate([data, data, other]).info == {"derived": "repeated images", **both}


def test_equal_entries_stay_and_later_ones_reach_the_provenance() -> None:
    a, b = (make({"dataset": "x", "publishes": t, "client": k}, k) for k, t in enumerate(("pixels; m", "labels; m")))
    both = LabeledImages.concatenate([a, b])
    assert both.info == {"dataset": "x", "publishes": "pixels; m; labels", "provenance": [a.info, b.info]}
    assert LabeledImages.concatenate([both, a]).info == both.info
    infos = [a.info, b.info, {"dataset": "y", "client": 0, "derived": ""}]
    assert combined_info(infos) == {"publishes": both.info["publishes"], "provenance": infos}
    odd = [{"b": None}, {"provenance": "web"}]
    assert combined_info(odd) == {"provenance": odd}
    facts = {"method": "n", "publishes": "means; m", "derived": "k", **STATED}
    marks = {"publishes": "pixels; m; labels; means", "derived": "k; d"}
    assert derived_info(facts, [a.info, b.info], "d") == {"method": "n", **marks}
    assert derived_info(facts, [SURE, a.info], "d")["reason"].startswith("some of the joined images have no guarantee")
    renamed = both.replace(info=both.info | {"round": 3, "client": 2, "epsilon": 1.0})
    entries = LabeledImages.concatenate([renamed, a]).info["provenance"]
    assert entries == [{**a.info, "round": 3, "client": 2}, {**b.info, "round": 3, "client": 2}, a.info]


def test_every_entry_of_a_guarantee_is_known() -> None:
    names = set()
    for epsilon in (1.0, None):
        remarks, facts = ("r",), {"condense_private": ("init",)}
        names |= set(Guarantee(epsilon, 1e-5, RELATION, 1.0, "pld", "seeded", remarks, facts, 2.0).info())
    assert names == set(GUARANTEE)
    assert len(dataclasses.fields(Guarantee)) == 9


SELECTED: dict[str, Callable[[LabeledImages], LabeledImages]] = {
    "random": partial(random_subset, ipc=2),
    "herding": partial(herding, ipc=2),
    "k-center": partial(k_center, ipc=2),
    "initial images": partial(initial_images, ipc=2),
    "initial images, statistics": partial(initial_images, ipc=2, init="statistics"),
    "stitch": lambda s: stitch(s, observer=CNN, ipc=1, progress=False),
    "distribution matching": lambda s: matched(s, ipc=1),
    "class_means": lambda s: condense_private(s, epsilon=1.0, num_networks=1, steps=1, ipc=2, progress=False),
}
PRIVATE: dict[str, Callable[[LabeledImages], object]] = {
    "condense_private": partial(condense_private, epsilon=1.0, num_networks=1, steps=1, ipc=1),
    "image_sgd": partial(image_sgd, sigma=1.0, size=8, steps=1, ipc=1),
    "train_private": lambda s: train_private(CNN, s, epsilon=1.0, size=8, steps=1, rate=0.5, ledger=Ledger()),
}


@pytest.mark.parametrize("kind", SELECTED)
@pytest.mark.filterwarnings("ignore")
def test_what_was_selected_by_data_is_no_record(kind: str, tmp_path: Path) -> None:
    real = make({"dataset": "x"}, n=12)
    chosen, name = SELECTED[kind](real), kind.split(",")[0]
    joined = LabeledImages.concatenate([real, chosen[1:].renormalize(real.normalization)])
    loaded = LabeledImages.load(joined.save(tmp_path / "set.safetensors"))
    for derived in (chosen, chosen.replace(images=chosen.images + 1), loaded):
        assert name in derived.info["derived"]
        for call in PRIVATE.values():
            with pytest.raises(PrivacyError, match=f"made from other records .*{name}.* Pass the original"):
                call(derived)
    if kind == "herding":
        assert PRIVATE["train_private"](chosen.replace(info={})) is not None
