"""Serialization to JSON: objects are rebuilt, and files cannot construct or call anything else."""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import math
import os
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torchvision.models
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import distillkit
import fl
from distillkit import LabeledImages, Normalization, serialization
from distillkit._utils.plain_values import plain_values
from distillkit.augment import DIGITS, DSA, CropFlip
from distillkit.condense import distribution_matching
from distillkit.generate import Patches
from distillkit.networks import ConvNet, FixedNetwork, KeepInit, LeNet, NetworkBall, RandomNetworks
from distillkit.normalization import ZCA
from distillkit.privacy import TrainedNetworks
from distillkit.serialization import (
    ConfigError,
    Configurable,
    SerializationError,
    from_config,
    referenced_objects,
    to_config,
)
from distillkit.training import Protocol
from tests.refused import refused

HERE = __name__
small = partial(ConvNet, (1, 8, 8), 3, width=4, depth=2)


def through_json(value: Any, **how: Any) -> Any:
    return from_config(json.loads(json.dumps(to_config(value, store=how.get("store")))), trust=[HERE], **how)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


@settings(max_examples=50)
@given(PLAIN)
def test_plain_values_keep_their_types_and_order(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        Path("a/b"), torch.float16, torch.device("cuda", 1), range(2, 9, 3), ConvNet, nn.Linear,
        torch.nn.functional.cross_entropy, torchvision.models.resnet18, distribution_matching, fl.FedAvg,
        DSA(DIGITS, crop=0.25), Protocol(augment=DSA()),
        CropFlip(Normalization([0.5], [0.25])), Normalization([0.1, 0.2, 0.3], [0.5, 0.5, 0.5], measured=True),
    ],
    ids=lambda value: getattr(value, "__qualname__", str(value)),
)  # fmt: skip
def test_types_functions_and_dataclasses_round_trip(value: Any) -> None:
    again = through_json(value)
    assert again == value
    assert type(again) is type(value)
    assert vars(again) == vars(value) if isinstance(value, Normalization) else True


def test_plain_values_need_no_classes() -> None:
    said = to_config({"crop": DSA(crop=0.25), 3: [(1, "a"), {"mean": None}], "path": Path("a")})
    found = plain_values(json.loads(json.dumps(said)))
    assert found.pop("crop") == {"object": "distillkit.augment:DSA", **vars(DSA(crop=0.25))}
    assert found == {"3": [[1, "a"], {"mean": None}], "path": {"path": "a"}}
    assert plain_values({"path": "a", "tuple": 3}) == {"path": "a", "tuple": 3}


def test_numpy_scalars_sizes_and_read_only_mappings_are_plain() -> None:
    value = {"a": np.bool_(True), "b": np.float32(0.5), "c": torch.Size([1, 2]), "d": types.MappingProxyType({"e": 1})}
    assert through_json(value) == {"a": True, "b": 0.5, "c": (1, 2), "d": {"e": 1}}


def sampled(value: Any) -> torch.Tensor:
    network = value.draw(torch.Generator().manual_seed(3))
    return network(torch.linspace(0, 1, 128).reshape(2, 1, 8, 8)).detach()


def trained() -> nn.Module:
    return small().eval()


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomNetworks(small),
    "as made": lambda: RandomNetworks(KeepInit(small)),
    "fixed": lambda: FixedNetwork(trained()),
    "ball": lambda: NetworkBall(trained(), 2.0),
    "another split": lambda: FixedNetwork(distillkit.networks.split(trained(), "classifier")),
    "trained": lambda: TrainedNetworks(small, digits(), Protocol(epochs=1)),
}


def digits() -> LabeledImages:
    images = torch.linspace(-1, 1, 6 * 64).reshape(6, 1, 8, 8)
    return LabeledImages(images, torch.arange(6) % 3, normalization=Normalization([0.5], [0.5]))


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_draw_the_same_networks_again(name: str, tmp_path: Path) -> None:
    sampler = SAMPLERS[name]()
    before = torch.random.get_rng_state()
    again = through_json(sampler, store=tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(sampled(again), sampled(sampler))
    assert to_config(again, store=tmp_path) == to_config(sampler, store=tmp_path)


@pytest.mark.parametrize(("training", "dtype"), [(False, torch.float32), (True, torch.float64)])
def test_networks_keep_their_mode_weights_and_running_statistics(
    training: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    network = ConvNet((1, 8, 8), 3, width=4, depth=2, norm="batch").train()
    network(torch.rand(5, 1, 8, 8))
    again = through_json(network.train(training).to(dtype), store=tmp_path)
    assert {value.dtype for value in again.parameters()} == {dtype}
    assert {part.training for part in again.modules()} == {training}
    assert all(torch.equal(again.state_dict()[name], value) for name, value in network.state_dict().items())


def test_tensors_and_sets_are_stored_once(tmp_path: Path) -> None:
    picture, data = torch.rand(3, 32, 32), digits()
    white = Normalization([0.5], [0.5], ZCA.fit(torch.rand(4, 1, 2, 2)))
    value = {"picture": picture, "again": [picture, data], "state": small().state_dict(), "crops": Patches(picture)}
    again = through_json({**value, "space": white}, store=tmp_path)
    assert torch.equal(again["picture"], picture)
    assert torch.equal(again["again"][1].images, data.images)
    assert again["again"][1].normalization == data.normalization
    assert again["space"] == white
    assert list(again["state"]) == list(value["state"])
    assert all(torch.equal(again["state"][k], v) for k, v in value["state"].items())
    assert again["crops"].digest == value["crops"].digest
    assert len(list(tmp_path.iterdir())) == 6


def test_files_of_another_store_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = to_config(digits(), store=tmp_path / "one")
    assert to_config([digits(), torch.zeros(2)], store=tmp_path / "two", shared=tmp_path / "one")[0] == said
    name = f"{said['set']}.safetensors"
    assert (tmp_path / "one" / name).samefile(tmp_path / "two" / name)
    assert len(list((tmp_path / "two").iterdir())) == 2
    assert to_config(digits(), store=tmp_path / "three", shared=tmp_path / "nowhere") == said
    assert (tmp_path / "three" / name).exists()
    for shared in ("nowhere", "one"):
        assert to_config(digits(), store=tmp_path / shared / "in", shared=tmp_path / shared) == said
        assert (tmp_path / shared / "in" / name).exists()
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError("a file system without links")))


def test_nothing_is_written_if_anything_cannot_be_serialized(tmp_path: Path) -> None:
    with pytest.raises(SerializationError):
        to_config([torch.zeros(2), lambda: 3], store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


class Twice(Configurable):
    """A user's own augmentation, as a class with an `__init__`."""

    def __init__(self, by: float, /, *names: str, often: int = 2, **more: int) -> None:
        self.options = (by, names, often, more)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images


class Once(Twice):
    def __init__(self, by: float, /) -> None:
        super().__init__(by)


class Plain:
    pass


class Marked(torch.Tensor):
    pass


def grey(outputs: int = 3) -> nn.Module:
    return LeNet((1, 16, 16), outputs)


@dataclass(frozen=True)
class Options:
    rates: list[float] = field(default_factory=list)
    hidden: int = field(default=3, repr=False)
    derived: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", self.hidden + 1)


@dataclass
class Starts:
    start: InitVar[int]


def test_users_classes_and_functions_round_trip() -> None:
    for value in (Twice(0.5), Twice(0.5, "a", "b", often=3, depth=2), Once(0.5)):
        again = through_json(value)
        assert again.options == value.options
        assert to_config(again) == to_config(value)
        for copied in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert copied.init_arguments() == value.init_arguments()
    assert through_json(Options([0.1], hidden=7)) == Options([0.1], hidden=7)
    assert through_json(grey) is grey
    assert from_config(to_config(grey), names=referenced_objects([grey])) is grey


def test_recorded_class_without_options_takes_none() -> None:
    class Nothing(Configurable):
        pass

    refused(lambda: Nothing(3), TypeError, r"Nothing\(\) takes no arguments")


UNNAMED = partial(ConvNet, norm=lambda: 3)


def loop() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([Options(), UNNAMED], r"^value\[1\].norm is a function <lambda>, .*functools.partial\(ConvNet"),
        ({"a": (lambda: 3,)}, r"^value\['a'\]\[0\] is a function <lambda>"),
        (partial(lambda: 3, 1), r"^value.func is a function <lambda>"),
        (loop.__get__(3), r"^value is a method loop"),
        (Twice(0.5, lambda: 3), r"^value.args\[1\] is a function <lambda>"),  # type: ignore[arg-type]
        (Options(rates=[Plain()]), r"^value.rates\[0\] is a Plain, .* frozen dataclass or a class derived from"),
        (torch.Generator(), "^value is a Generator, .* pass the seed"),
        (torch.zeros(2).numpy(), "^value is a ndarray, .* torch.from_numpy"),
        (nn.Sequential(nn.Linear(2, 2)), "^value is a Sequential, .*derived from .*Configurable"),
        ([torch.zeros(2).as_subclass(Marked)], r"^value\[0\] is a Marked, which has no JSON form"),
        ([torch.zeros(2)], r"^value\[0\] has 1 tensors, which JSON cannot hold: pass store="),
        (digits(), "^value is a set of 6 images, .* pass store="),
        ({3: {"w": torch.zeros(2)}}, r"^value\[3\] has 1 tensors, .* pass store="),
        (loop(), r"^value\[0\]\[0\].* contains itself"),
        (sys, "^value is a module"),
        (np.longdouble(1), "^value.* contains itself"),
        ({1, 2}, "^value is a set, "),
        (b"abc", "^value is a bytes, "),
        (Starts(3), "^value is a Starts, .* class derived from"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_unserializable_objects_are_named_with_path_and_remedy(value: Any, message: str) -> None:
    refused(lambda: to_config(value), SerializationError, message)


def test_local_classes_and_functions_have_no_path() -> None:
    def inside() -> None: ...

    @dataclass
    class Inside:
        pass

    refused(lambda: to_config(inside), SerializationError, r"^value is a function .*inside, .*top level")
    refused(lambda: to_config(Inside()), SerializationError, r"^value is a .*Inside, .* top level")


# Files that mean harm, or are damaged.

WORLD = [
    "os:system", "posix:system", "builtins:eval", "builtins:exec", "subprocess:Popen", "importlib:import_module",
    "pickle:loads", "torch:load", "torch.hub:load", "numpy:load", "shutil:rmtree", "this:s", "antigravity:webbrowser",
    "distillkit._utils.files:write_atomically", "distillkit._utils.files:os", "distillkit._utils.files:os.system",
    "distillkit.privacy:Ledger", "distillkit.privacy.ledger:Ledger", "distillkit.condense._state:save_state",
    "distillkit.locking:owned", "fl.engine.store:Store", "fl:simulate",
    "torch.nn:Module.load_state_dict", "torch.nn.functional:torch.load", "torch.nn:functional.torch.load",
    "torch.nn.functional:importlib.import_module", "torchvision.models:_api", "distillkit.serialization:_find",
    "distillkit.networks:ConvNet.__init__.__globals__", "distillkit:..os", "", ":", "distillkit", "os:", ":system",
    "distillkit.networks:", "distillkit.nowhere:f", "distillkit.networks:Nowhere", "fl/../os:system",
    "distillkit._utils.configurable:Configurable.__subclasses__", "torch.nn.modules.module:warnings.warn",
    f"{HERE}:os.system", f"{HERE}:json.loads", f"{HERE}:DIGITS", f"{HERE}:small",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["name", "object", "partial"])
@pytest.mark.parametrize("path", WORLD)
def test_file_cannot_name_other_objects(path: str, kind: str) -> None:
    said = {"partial": {"name": path}} if kind == "partial" else {kind: path}
    before = set(sys.modules)
    refused(lambda: from_config(said, trust=[HERE]), ConfigError, r"config.*names='?|config")
    assert set(sys.modules) - before == set()


def test_only_dataclasses_and_recorded_classes_are_called() -> None:
    called: list[int] = []
    said, words = {"object": "x:f", "args": [3]}, "is neither a dataclass nor Configurable"
    refused(lambda: from_config(said, names={"x:f": called.append}), ConfigError, words)
    refused(lambda: from_config({"object": f"{HERE}:Plain"}, trust=[HERE]), ConfigError, words)
    refused(lambda: from_config({"object": "torch.nn:Linear", "args": [2, 2]}), ConfigError, words)
    assert called == []


def test_module_is_trusted_only_by_its_exact_name() -> None:
    said = to_config(grey)
    for trust in ([], ["tests"], ["tests.distillkit"]):
        with pytest.raises(ConfigError, match=rf"names '{HERE}:grey', which is outside .*names=.*trust=\['{HERE}'\]"):
            from_config(said, trust=trust)
    assert from_config(said, trust=HERE) is grey
    refused(lambda: from_config(said, trust=3), TypeError, "trust must be a list of names")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "said",
    [
        {}, {"a": 1}, {"tuple": 3}, {"tuple": [1], "float": "nan"}, {"float": "x"}, {"dict": [[1]]},
        {"dict": [[[1], 2]]}, {"dict": 3}, {"range": [1, 2, 0]}, {"range": ["a"]}, {"path": 3}, {"dtype": "load"},
        {"dtype": "nowhere"}, {"device": "nowhere"}, {"name": 3}, {"name": "os:system", "more": 1},
        {"partial": 3}, {"partial": {"name": "torch.nn:Linear"}, "args": 3}, {"object": "fl:FedAvg", "with": [1]},
        {"object": "distillkit.augment:DSA", "with": {"colour": 3}}, {"object": "distillkit.augment:DSA", "args": 3},
        {"object": "distillkit.augment:DSA", "with": {"mode": "X"}}, {"tensor": "a"}, {"tensor": "../../etc/passwd"},
        {"tensor": "0" * 32}, {"set": "0" * 32}, {"tensors": 3}, {"kind/2": 1}, (1, 2),
        {"object": "distillkit.networks:ConvNet", "args": [[1, 8, 8], 3], "weights": "0" * 32},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_or_unknown_values_are_refused_by_path(said: Any, tmp_path: Path) -> None:
    refused(lambda: from_config([0, said], store=tmp_path), ConfigError, r"^config\[1\]")


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}], ids=["list", "tuple", "dict"])
def test_nesting_of_100_levels_round_trips_and_more_is_refused(wrap: Callable[[Any], Any]) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = wrap(deep)
    assert through_json(deep) == deep
    words = r"\.\.\. contains itself, or is nested deeper than 100 levels$"
    refused(lambda: to_config(wrap(deep)), SerializationError, words)
    refused(lambda: from_config([to_config(deep)]), ConfigError, r"\.\.\. is nested deeper than 100 levels$")


@settings(max_examples=50)
@given(PLAIN)
def test_any_json_is_rebuilt_or_refused(value: Any) -> None:
    with contextlib.suppress(ConfigError):  # no other error
        from_config(json.loads(json.dumps(value, skipkeys=True)))


def test_changed_or_missing_tensors_are_refused(tmp_path: Path) -> None:
    said = to_config([torch.zeros(2), digits()], store=tmp_path)
    files = {k: tmp_path / f"{v}.safetensors" for part in said for k, v in part.items()}
    digits().replace(labels=torch.zeros(6, dtype=torch.int64)).save(files["set"])
    refused(lambda: from_config(said, store=tmp_path), ConfigError, r"config\[1\].*was changed")
    other = to_config(torch.ones(2), store=tmp_path)
    os.replace(tmp_path / f"{other['tensor']}.safetensors", files["tensor"])
    refused(lambda: from_config(said, store=tmp_path), ConfigError, r"config\[0\].*was changed")
    files["tensor"].unlink()
    refused(lambda: from_config(said, store=tmp_path), ConfigError, r"config\[0\].*does not exist")
    refused(lambda: from_config(said), ConfigError, r"config\[0\] needs .* pass store=")
    longer, words = {"tensor": f"{other['tensor']}/a"}, "^config: a fingerprint must have 32 hex digits, got '.*/a'$"
    refused(lambda: from_config(longer, store=tmp_path), ConfigError, words)


def test_trusted_packages_have_no_functions_that_write_files() -> None:
    """Otherwise a file could have a `partial` of them called in place of a network factory."""
    root = Path(distillkit.__file__).parent
    ours = [p.removeprefix("distillkit.") for p in serialization._FUNCTION_PACKAGES if p.startswith("distillkit.")]
    for package, path in ((r, p) for r in ours for p in (root / r).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        called = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        writes = (names | called) & {"write_atomically", "write_tensors", "atomic_replace", "write_bytes", "write_text",
                                     "rmtree", "save_file", "system", "Popen", "import_module"}  # fmt: skip
        writes |= names & {"eval", "exec"}
        if package == "data":
            writes -= {"atomic_replace", "write_atomically", "write_tensors"}  # caches of what they read
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        excluded = serialization._EXCLUDED_MODULES
        assert not writes or module in excluded, f"{module} uses {writes}: exclude it, or move it"


@pytest.mark.parametrize("process", ["__main__", "__mp_main__"])
def test_functions_of_a_script_are_found_in_spawned_processes(process: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType(process)
    exec("import os\nfrom os import system\ndef mine(): ...\n", vars(script))
    monkeypatch.setitem(sys.modules, process, script)
    monkeypatch.setitem(sys.modules, "__main__", script)  # as `multiprocessing` does
    said = to_config(script.mine)
    assert said["name"] == "__main__:mine"
    assert from_config(said) is script.mine
    for path in ("__main__:os.system", "__main__:system", "__main__:nowhere", "__mp_main__:mine"):
        refused(partial(from_config, {"name": path}), ConfigError, "names")


def test_class_may_be_ordered_mapping_of_tensors(tmp_path: Path) -> None:
    assert list(through_json(OrderedDict(b=1, a=2))) == ["b", "a"]
