"""Keys in a run's records do not depend on class names."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fl
from fl import AddOn, Entry, EntrySpec, FedAvg, Filter, Filtered, simulate
from fl._components import Component, KeyedObject, options_by_name, stable_repr
from fl.addons import SCAFFOLD, NaiveVHL
from fl.message import declared_entries
from fl.method import Method
from tests.fl.federations import Tiny, federation, images
from tests.fl.invariances import assert_same
from tests.refused import refused


def built_in() -> list[type[KeyedObject]]:
    """Return every public method, add-on and filter except base classes, by name."""
    for module in pkgutil.walk_packages(fl.__path__, "fl."):
        importlib.import_module(module.name)

    def below(kind: type[KeyedObject]) -> Iterator[type[KeyedObject]]:
        for sub in kind.__subclasses__():
            yield sub
            yield from below(sub)

    bases = {Method, Component, AddOn, Filter}
    found = {kind for kind in below(KeyedObject) if kind.__module__.startswith("fl.") and kind not in bases}
    return sorted(found, key=lambda kind: (kind.__name__, kind.__module__))


def test_repr_shows_the_current_names() -> None:
    assert "NaiveVHL(source='gaussian'" in repr(FedAvg(NaiveVHL("gaussian", 3), factory=Tiny))
    assert repr(Renamed(2.0)) == "Renamed(strength=2.0)"
    assert repr(FedAvg(Renamed(), factory=Tiny)).startswith("FedAvg(Renamed(strength=1.0), lr=0.1")
    method, shift = options_by_name(Filtered(FedAvg(Renamed(), factory=Tiny), RenamedShift()))["args"]
    assert (method["args"][0]["object"], shift["object"]) == ("tests:Noisy", "tests:Shift")
    assert repr(Filtered(FedAvg(factory=Tiny), RenamedShift())).endswith(", RenamedShift(by=0.5))")
    assert options_by_name(RenamedShift(float("inf"))) == {"object": "tests:Shift", "args": [], "with": {"by": "inf"}}


class _Work(AddOn):
    """Keeps memory and state, draws on both sides, and does not commute with `Late`."""

    data_access = "none"
    strength: float
    total: Entry[Tensor]
    mine: Entry[Tensor]

    def start(self, server: Any) -> None:
        server.state[self.total] = torch.rand((), generator=server.generator(self.key))

    def expect(self, server: Any, client: int, schema: Any) -> None:
        schema[self.mine.key] = EntrySpec(torch.zeros(()))

    def correct_gradient(self, step: Any, grads: Any) -> None:
        if "draws" not in step.local.scratch(self):
            step.local.scratch(self)["draws"] = step.local.generator(self)
        for grad in grads.values():
            grad += self.strength * torch.rand((), generator=step.local.scratch(self)["draws"])

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        kept = local.memory.get(self.mine, torch.zeros(()))
        local.memory[self.mine] = kept + next(iter(update.values())).sum()
        reply[self.mine] = local.memory[self.mine]

    def receive(self, server: Any, replies: Any, old: Any) -> None:
        server.state[self.total] = server.state[self.total] + replies[self.mine]


@dataclass(frozen=True)
class Noisy(_Work):
    strength: float = 1.0
    total = Entry[Tensor]("first")
    mine = Entry[Tensor]("mean")


@dataclass(frozen=True)
class Renamed(_Work):
    key = "Noisy"
    strength: float = 1.0
    total = Entry[Tensor]("first")
    mine = Entry[Tensor]("mean")


@dataclass(frozen=True)
class Late(AddOn):
    """Sorts between "Noisy" and "Renamed" by name."""

    key = "Otherwise"

    def correct_gradient(self, step: Any, grads: Any) -> None:
        for grad in grads.values():
            grad *= 0.5


@dataclass(frozen=True)
class RenamedShift(Filter):
    key = "Shift"
    by: float = 0.5


def play(*addons: AddOn, rounds: int = 3, **how: Any) -> Any:
    method = FedAvg(*addons, factory=Tiny, steps=2, batch=4)
    return simulate(method, federation(), rounds=rounds, participation=3, test=images(9, 7), progress=False, **how)


def test_renamed_class_with_its_old_key_resumes_old_runs(tmp_path: Path) -> None:
    whole = play(Noisy(), Late())
    play(Noisy(), Late(), rounds=1, out=tmp_path)
    went_on = play(Late(), Renamed(), out=tmp_path, resume=True)
    assert_same(went_on, whole)
    assert_same(play(Renamed(), Late()), whole)
    assert {"Noisy.total", "FedAvg.model"} == dict(went_on.server.state.items()).keys()


def test_subclass_has_its_own_key_and_its_parents_entries() -> None:
    class Mine(Renamed):
        extra = Entry[float]("sum")

    refused(lambda: type("Odd", (AddOn,), {}, extra=1), TypeError, "takes no keyword arguments")
    assert Mine.key == "Mine"
    assert [e.key for e in declared_entries(Mine())] == ["Noisy.total", "Noisy.mine", "Mine.extra"]
    assert options_by_name(Mine(3.0))["object"].endswith("Mine")


@pytest.mark.parametrize("wrong", [3, "", "a b", "a.b", None, Entry[float]("sum")], ids=str)
def test_key_must_be_a_valid_name(wrong: Any) -> None:
    refused(lambda: type("Odd", (AddOn,), {"key": wrong}), TypeError, r"^Odd.key must be a name, as 'Odd', got")


def test_two_parts_with_one_key_are_refused_by_name() -> None:
    said = "^Noisy and Renamed have the same key, 'Noisy'"
    refused(lambda: FedAvg(Noisy(), Renamed(), factory=Tiny), ValueError, said)

    class Shift(Filter):
        pass

    with pytest.raises(ValueError, match=r"Shift and RenamedShift have the same key, 'Shift'"):
        Filtered(FedAvg(factory=Tiny), Shift(), RenamedShift())


def test_method_without_described_arguments_is_not_mistaken_for_another(tmp_path: Path) -> None:
    """Its `repr` is the default with the address, never a bare name without the options."""

    class Quiet(FedAvg):
        def arguments(self) -> Any:
            return None

    class Loud(FedAvg):
        def __repr__(self) -> str:
            return f"Loud(lr={self.settings.lr})"

    assert " at 0x" in stable_repr(Quiet(factory=Tiny))
    assert stable_repr(Loud(factory=Tiny)) == "Loud(lr=0.1)"


def test_keys_are_the_names_of_classes_but_for_compositions_of_fedavg() -> None:
    differing = {kind.__name__: kind.key for kind in built_in() if kind.key != kind.__name__}
    assert differing == dict.fromkeys(["FedLGD", "FedRep", "SingleImage"], "FedAvg")


# Attributes that are not options, and owners of entries.


@pytest.mark.parametrize("kind", [k for k in built_in() if issubclass(k, Component)], ids=lambda k: k.__name__)
def test_options_do_not_shadow_other_attributes(kind: type[Component]) -> None:
    base: type[Component] = AddOn if issubclass(kind, AddOn) else Filter
    assert not [name for name in inspect.signature(kind).parameters if hasattr(base, name)]


@pytest.mark.parametrize(
    ("base", "name", "default", "error"),
    [
        (
            AddOn,
            "data_access",
            "none",
            r"Mine.data_access is not an option, but its annotation .*: write `data_access = ",
        ),
        (AddOn, "key", "Mine", "Mine.key is not an option"),
        (AddOn, "private", True, "Mine.private is not an option"),
        (AddOn, "loss", 0.1, "Mine.loss is a hook and cannot be an option too: rename the option"),
        (Filter, "back", 1, "Mine.back is a hook"),
        (Method, "private", True, "Mine.private is not an option"),
    ],
)
def test_annotation_cannot_make_a_reserved_attribute_an_option(base: Any, name: str, default: Any, error: str) -> None:
    body = {"__annotations__": {name: type(default)}, name: default, "__module__": __name__}
    if base is Method:
        body |= {verb: lambda self, *_: None for verb in Method.__abstractmethods__}
    mine = dataclass(frozen=True)(type("Mine", (base,), body))()
    use = {
        AddOn: lambda: FedAvg(mine, factory=Tiny),
        Filter: lambda: Filtered(FedAvg(factory=Tiny), mine),
        Method: lambda: simulate(mine, federation(), rounds=1, progress=False),
    }
    refused(lambda: use[base](), TypeError, error)


def test_attributes_without_annotation_and_properties_are_no_options() -> None:
    @dataclass(frozen=True)
    class Mine(AddOn):
        begins: int = 3
        data_access = "none"
        damping: ClassVar[float] = 0.5

        @property
        def first_round(self) -> int:  # type: ignore[override]
            return self.begins

    assert FedAvg(Mine(begins=4), factory=Tiny).addons[0].first_round == 4


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("data_access", "nothing", r"Mine.data_access must be one of 'none', 'example', 'batch', got 'nothing'"),
        ("extra_outputs", -1, "Mine.extra_outputs must be at least 0"),
        ("extra_outputs", 1.5, "Mine.extra_outputs must be an int"),
        ("first_round", 0, "Mine.first_round must be at least 1"),
        ("damping", -0.1, "Mine.damping must be"),
        ("single_label", "yes", "Mine.single_label must be True or False"),
        ("layers", "body", "Mine.layers must be .*names of modules"),
        ("layers", ("body", 3), "Mine.layers must be names of modules of the network, got 3"),
    ],
)
def test_declarations_of_an_add_on_are_checked_when_installed(name: str, value: Any, error: str) -> None:
    """A misspelt `data_access` must not bypass the check of DP-SGD, which would then ignore the term."""
    mine = type("Mine", (AddOn,), {name: value})()
    refused(lambda: FedAvg(mine, factory=Tiny), (TypeError, ValueError), error)


class Scaffold(AddOn):
    """A user's add-on with the key of a built-in one, and one of its entries too."""

    key = "SCAFFOLD"

    control = Entry[Tensor]("first")


class Shift(Filter):
    total = Entry[Tensor]("sum")


def test_two_entries_with_one_key_are_refused_by_their_owners() -> None:
    class Heir(SCAFFOLD):
        pass

    class Other(SCAFFOLD):
        pass

    class Noisy(Filter):
        total = Entry[Tensor]("sum")

    class Averages(FedAvg):
        key = "Shift"
        total = Entry[Tensor]("sum")

    refused(lambda: FedAvg(Scaffold(), SCAFFOLD(), factory=Tiny), ValueError, "have the same key, 'SCAFFOLD'")
    with pytest.raises(ValueError, match=r"Heir and SCAFFOLD share the entry SCAFFOLD.control, .* one of its own"):
        FedAvg(Heir(), SCAFFOLD(), factory=Tiny)
    with pytest.raises(ValueError, match=r"Heir and Other share the entry SCAFFOLD.control"):
        FedAvg(Heir(), Other(), factory=Tiny)
    here = re.escape(__name__)
    shifts = rf"{here}.*Averages and {here}.Shift both have an entry with the key 'Shift.total', and Averages and Shift"
    refused(lambda: Filtered(Averages(factory=Tiny), Shift()), ValueError, shifts)
    with pytest.raises(ValueError, match=r"Renamed and .*Noisy both have an entry with the key 'Noisy.total'"):
        Filtered(FedAvg(Renamed(), factory=Tiny), Noisy())


def test_alias_of_an_entry_does_not_declare_it_again() -> None:
    class Reads(AddOn):
        samples = FedAvg.samples

    class Twice(AddOn):
        samples = FedAvg.samples

    assert len(FedAvg(Reads(), Twice(), factory=Tiny).addons) == 2


def test_subclass_may_redeclare_its_parents_entry() -> None:
    class Summed(FedAvg):
        key = "FedAvg"
        counters = Entry[Any]("first")

    made = Summed(factory=Tiny)
    assert [e.rule for e in made.entries() if e.key == "FedAvg.counters"] == ["first"]
