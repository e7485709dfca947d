"""A task: the owners of data, and separation of training and test images."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distillkit import LabeledImages, Normalization
from distillkit.data import Split, load, partition, split_by
from distillkit.networks import ConvNet
from distillkit.serialization import from_config, to_config
from distillkit.study import Task, as_split
from tests.refused import refused

PLAIN = Normalization([0.0], [1.0])


def images(count: int, classes: int = 3, seed: int = 0, **columns: torch.Tensor) -> LabeledImages:
    """Return images whose only pixel is their number."""
    rng = torch.Generator().manual_seed(seed)
    pixels = torch.arange(count, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).clone()
    labels = torch.randint(classes, (count,), generator=rng)
    return LabeledImages(pixels, labels, num_classes=classes, normalization=PLAIN, columns=columns)


def numbers(data: LabeledImages | None) -> set[int]:
    return set() if data is None else set(data.images[:, 0, 0, 0].int().tolist())


def task(count: int = 60, **options: Any) -> Task:
    split = Split(images(count), images(10, seed=1), ("a", "b", "c"))
    deal = partial(partition.dirichlet, clients=4, alpha=0.5, min_size=0)
    return Task("made", **{"data": split, "partition": deal, **options})


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 99), own=st.sampled_from([0.0, 0.3]), share=st.sampled_from([0.0, 0.25]),
    validation=st.booleans(), cut=st.booleans(),
)  # fmt: skip
def test_every_image_has_one_use(seed: int, own: float, share: float, validation: bool, cut: bool) -> None:
    one = task(own_tests=own, server_share=share)
    keep = torch.arange(0, 60, 2) if cut else None
    split = one.load()
    dealt = one.assign(split, seed, validation=validation, keep=keep)
    uses = [numbers(c) for c in dealt.clients] + [numbers(t) for t in dealt.own_tests]
    uses += [numbers(dealt.server.get("proxy"))] + ([numbers(dealt.test)] if validation else [])
    assert sum(map(len, uses)) == len(set().union(*uses))
    if not cut and not (validation and own):
        assert set().union(*uses) == numbers(split.train)
    assert (dealt.test is split.test) == (not validation)
    apart = replace(split, validation=images(7, seed=2))
    assert one.assign(apart, seed, validation=True).test is apart.validation
    for data, owned in zip(dealt.clients, dealt.owners, strict=True):
        assert numbers(data) == set(owned.tolist())


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 99), keep=st.sets(st.integers(0, 59)), own=st.sampled_from([0.0, 0.3]))
def test_record_stays_with_its_owner_in_a_subset(seed: int, keep: set[int], own: float) -> None:
    one = task(own_tests=own)
    split = one.load()
    whole = one.assign(split, seed)
    part = one.assign(split, seed, keep=torch.tensor(sorted(keep), dtype=torch.int64))
    for all_of_it, kept in zip(whole.owners, part.owners, strict=True):
        assert kept.tolist() == [n for n in all_of_it.tolist() if n in keep]
    assert [numbers(t) for t in part.own_tests] == [numbers(t) for t in whole.own_tests]
    pooled, _ = one.pooled(split, keep=torch.tensor(sorted(keep), dtype=torch.int64))
    assert numbers(pooled) == set().union(*(numbers(c) for c in part.clients))


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 99), own=st.sampled_from([0.0, 0.3]), validation=st.booleans())
def test_candidate_without_clients_trains_on_the_clients_data(seed: int, own: float, validation: bool) -> None:
    one = task(own_tests=own, server_share=0.2)
    split = one.load()
    dealt, (pooled, test) = one.assign(split, seed, validation=validation), one.pooled(split, validation=validation)
    assert numbers(pooled) == set().union(*(numbers(c) for c in dealt.clients))
    assert numbers(test) == numbers(dealt.test)


def test_configurations_are_compared_on_held_out_data_not_the_test_set() -> None:
    one = task()
    split = one.load()
    dealt, whole = one.assign(split, 3, validation=True), one.assign(split, 3)
    held = numbers(dealt.test)
    assert held
    assert held <= numbers(split.train)
    assert not held & set().union(*(numbers(c) for c in dealt.clients))
    assert set().union(*(numbers(c) for c in whole.clients)) == numbers(split.train)
    own = Split(split.train, split.test, split.classes, validation=images(7, seed=2))
    assert task(data=own).assign(own, 0, validation=True).test is own.validation


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 99), own=st.sampled_from([0.0, 0.3]), share=st.sampled_from([0.0, 0.25]))
def test_grouped_images_are_on_one_side_of_every_split(seed: int, own: float, share: float) -> None:
    """Three corruptions of each of 40 images: clients are corruptions, tests are of other images."""
    whole = images(120, domain=torch.arange(120) // 40, picture=torch.arange(120) % 40)
    split = split_by(whole.replace(labels=(torch.arange(120) % 40) % 3), "picture", 0.25)
    one = Task("made", split, own_tests=own, server_share=share)
    dealt = one.assign(split, seed, validation=True)

    def shown(*sets: LabeledImages | None) -> set[int]:
        return {int(p) for data in sets if data is not None for p in data.columns["picture"]}

    sides = [shown(*dealt.clients), shown(*dealt.own_tests), shown(*dealt.server.values()), shown(dealt.test)]
    assert sum(map(len, sides)) == len(set().union(*sides))
    assert len(set().union(*sides)) == 30 or own
    assert [bool(side) for side in sides] == [True, own > 0, share > 0, True]
    assert [set(mine.columns["domain"].tolist()) for mine in dealt.clients] == [{0}, {1}, {2}]
    assert len({tuple(sorted(shown(data))) for data in dealt.own_tests}) == 1


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 99), st.integers(100, 199), st.sampled_from([0.0, 0.2]), st.sampled_from([None, images(70)[60:]]))
def test_no_configuration_uses_a_clients_test_image(seed: int, tried: int, share: float, apart: Any) -> None:
    split = replace(task().load(), validation=apart)
    one = task(data=split, own_tests=0.3, server_share=share)
    tries, dealt = one.assign(split, tried, validation=True), one.assign(split, seed)
    seen = [*tries.clients, *tries.own_tests, tries.test, tries.server.get("proxy")]
    tested = set().union(*(numbers(t) for t in dealt.own_tests))
    assert tested
    assert not tested & set().union(*map(numbers, seen))
    assert tested == set().union(*(numbers(t) for t in one.assign(split, seed + 1).own_tests))


@pytest.mark.parametrize(("options", "validation", "stated"), [
    ({}, False, None), ({}, True, "random"), ({"server_share": 0.2}, False, "random"),
    ({"own_tests": 0.2}, False, "random"), ({"own_tests": 0.5, "hold_out": "content"}, True, "content"),
])  # fmt: skip
def test_training_set_states_how_records_were_held_out(options: dict[str, Any], validation: bool, stated: Any) -> None:
    one = task(**options)
    split = one.load()
    assert one.pooled(split, validation=validation)[0].info.get("hold_out") == stated
    tests = one.assign(split, 0, validation=validation).own_tests
    assert any(map(numbers, tests)) == ("own_tests" in options)  # a tuning run holds out by decisions of its own
    apart = Split(split.train, split.test, split.classes, images(10, seed=2))
    assert Task("made", data=apart).pooled(apart, validation=True)[0].info == {}


def test_columns_are_clients_by_default_and_arguments_by_name() -> None:
    train = images(12, domain=torch.arange(12) % 3)
    split = Split(train, images(4, seed=1), ("a", "b", "c"))
    by_default = Task("domains", data=split).assign(split, 0)
    assert [numbers(c) for c in by_default.clients] == [{0, 3, 6, 9}, {1, 4, 7, 10}, {2, 5, 8, 11}]
    named = Task("domains", data=split, partition=partition.by_domain).assign(split, 0)
    assert [numbers(c) for c in named.clients] == [numbers(c) for c in by_default.clients]

    def further(domain: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return partition.by_domain(domain)

    other = Task("domains", data=split, partition=further).assign(split, 0)
    assert [numbers(c) for c in other.clients] == [numbers(c) for c in by_default.clients]


def test_seed_of_a_run_is_the_partitions() -> None:
    one = task()
    split = one.load()
    wanted = partition.dirichlet(split.train.labels, 4, 0.5, generator=7, min_size=0)
    assert all(torch.equal(a, b) for a, b in zip(one.assign(split, 7).owners, wanted, strict=True))


def test_task_round_trips_through_json(tmp_path: Path) -> None:
    one = Task(
        "digits", data=partial(load, "digits", size=8), partition=partial(partition.dirichlet, clients=3, alpha=0.1),
        factory=partial(ConvNet, (1, 8, 8), width=4, depth=1), rounds=2, own_tests=0.2,
    )  # fmt: skip
    said = json.loads(json.dumps(to_config(one)))
    again = from_config(said)
    assert to_config(again) == said
    split = again.load()
    assert torch.equal(split.train.images, one.load().train.images)
    assert again.network(split)(10)(split.train.images[:2]).shape == (2, 10)
    tensors = task(12)
    said = json.loads(json.dumps(to_config(tensors, store=tmp_path)))
    assert numbers(from_config(said, store=tmp_path).load().train) == set(range(12))


def test_tensors_become_a_split() -> None:
    x = torch.rand(6, 1, 4, 4)
    split = as_split((x, torch.tensor([0, 1, 2, 0, 1, 2])), (x, torch.zeros(6, dtype=torch.int64)))
    assert split.train.num_classes == split.test.num_classes == 3
    many = LabeledImages(torch.rand(30, 1, 1, 1), torch.arange(30) % 3, info={"hold_out": "content", "by": "me"})
    halves = as_split(many)
    assert [part.counts().tolist() for part in halves] == [[8] * 3, [2] * 3]
    assert torch.equal(torch.cat([part.images for part in halves]).sort(0)[0], many.images.sort(0)[0])
    assert torch.equal(as_split(many).test.images, halves.test.images)
    assert [part.info for part in halves] == [{"hold_out": "random", "by": "me"}] * 2
    three = (many[:12], many[12:20], many[20:])
    for found in (as_split(*three), Task("mine", data=three).data):  # type: ignore[arg-type]
        assert isinstance(found, Split)
        assert found.validation is not None
        assert [len(part) for part in (*found, found.validation)] == [12, 8, 10]
    rows = as_split(many.replace(labels=torch.eye(3)[many.labels]))
    assert torch.equal(rows.test.images, halves.test.images)
    refused(lambda: as_split(many[:6]), ValueError, r"test_fraction=0\.2 holds out no picture")
    one = Task("mine", data=((x, torch.tensor([0, 1, 2, 0, 1, 2])), (x, torch.zeros(6, dtype=torch.int64))))  # type: ignore[arg-type]
    assert isinstance(one.data, Split)
    named = Task("mine", data=split, factory="convnet", factory_options={"width": 4, "depth": 1})
    assert named.network(split)(3)(x).shape == (6, 3)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"name": "my task"}, ValueError, "name must consist of letters"),
        ({"data": 3}, TypeError, "data is called as"),
        ({"partition": 4}, TypeError, "partition must be a function"),
        ({"factory": "vgg"}, ValueError, "factory must be one of"),
        ({"factory_options": {"width": 3}, "factory": partial(ConvNet, (1, 4, 4))}, ValueError, "factory_options"),
        ({"validation": 0.0}, ValueError, "validation"),
        ({"own_tests": 1.0}, ValueError, "own_tests"),
        ({"rounds": 0}, ValueError, "rounds"),
        ({"data": ()}, ValueError, r"data must be a function, a Split, or a pair \(train, test\), got 0 values"),
        ({"data": [1]}, ValueError, r"a pair \(train, test\), got 1 values"),
        ({"factory_options": [3]}, TypeError, "factory_options must map names to values, got list"),
        ({"participation": 0}, ValueError, "participation"),
        ({"participation": 1.5}, ValueError, "participation"),
        ({"evaluate": "x"}, ValueError, "evaluate must be one of"),
    ],
)
def test_invalid_arguments_are_named(options: dict[str, Any], error: type[Exception], words: str) -> None:
    refused(lambda: Task(**{"name": "made", "data": task().data, **options}), error, words)


def test_set_without_owners_needs_a_partition() -> None:
    for names in (["user", "domain"], ["hospital"], []):
        data = images(60, **{name: torch.arange(60) % 4 for name in names})
        one = Task("made", data=Split(data, images(10, seed=1), ("a", "b", "c")))
        words = f"partition must be given for made, .* column domain or user, but {', '.join(names) or 'none'}$"
        refused(lambda one=one: one.assign(one.load(), 0), ValueError, words)
    for share in (0.5, 0.999):
        few = task(partition=partial(partition.iid, clients=40), server_share=share)
        words = rf"of 60 images: server_share={share}.* hold out"
        refused(lambda few=few: few.assign(few.load(), 0), ValueError, words)

    def by_hospital(hospital: torch.Tensor) -> list[torch.Tensor]:
        return [hospital]

    refused(lambda: task(partition=by_hospital).assign(one.load(), 0), ValueError, "'hospital'")
    refused(lambda: task().assign(one.load(), 0, keep=torch.tensor([60])), ValueError, "keep must be numbers")
    refused(lambda: task().assign(one.load(), 0, keep=torch.arange(60) > 5), TypeError, "keep must be numbers")
    refused(lambda: task().assign(task().load(), 0, keep="abc"), TypeError, "keep must be a list of numbers")  # type: ignore[arg-type]
    refused(lambda: task().assign(None, 0), TypeError, "split must be a Split, as Task.load returns it, got NoneType")  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [None, (), {1, 2}])
def test_data_that_are_no_split_are_refused_by_type(made: Any) -> None:
    refused(Task("made", data=lambda: made).load, TypeError, f"data must return a Split, .*got {type(made).__name__}")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (None, "partition must be a list of index tensors, one per client, got NoneType"),
        (3, "got int"),
        ("ab", "got str"),
        ([], "at least one client"),
        ([[0.5, 1.5]], r"partition\[0\]"),
        ([[0, 1], [-1]], r"partition\[1\]"),
        ([[0], [60]], r"partition must hold indices in \[0, 60\), got 60 to 60 for client 1"),
        ([[0, 1], [1]], "assign each image at most once"),
    ],
)
def test_partition_must_return_indices_of_the_images(parts: Any, said: str) -> None:
    """A negative index counted from the end, and gave images to two clients."""
    one = task(partition=lambda labels: parts)
    refused(lambda: one.assign(one.load(), 0), (TypeError, ValueError), said)
