"""Validation in `simulate` and methods: invalid arguments are refused by name before round 1.

Wrong types and ranges of single arguments are tried in `test_odd_calls.py`.
"""

from __future__ import annotations

import copy
from collections import UserList
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distillkit import LabeledImages, Normalization
from distillkit.networks import KeepInit
from distillkit.privacy import Ledger
from fl import Classification, ClientData, ClientDP, FedAvg, FedDM, Filtered, MultiLabel, Real, simulate
from fl.addons import DPSGD, MOON, SCAFFOLD, Anchors, Condensed, Ditto, FedCOG, FedGen, FedProx, FineTune, SharedImage
from fl.averaging.addon import AddOn
from fl.batches import Phase
from fl.engine._clients import ClientRegistry
from fl.engine._run_options import _drawn_count
from fl.method import require_single_label
from fl.methods import FedProto, FedRep, PrivateFedDM, SingleImage
from fl.networks import _blanks, embedding_size
from tests.fl.federations import Tiny, federation, images
from tests.fl.invariances import network
from tests.refused import refused


def play(method: Any = None, clients: Any = None, **options: Any) -> Any:
    method = FedAvg(factory=Tiny) if method is None else method
    return simulate(method, federation() if clients is None else clients, **{"rounds": 1, "progress": False, **options})


# What a method is built from.


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: FedAvg(FedProx, factory=Tiny), r"got the class FedProx: FedAvg\(FedProx\(\.\.\.\)"),
        (lambda: FedAvg(ClientDP(1.0, 1.0, 1.0), factory=Tiny), "FedAvg takes add-ons .* got ClientDP"),
        (lambda: FedAvg(Tiny), "got type; pass the function that makes the network as FedAvg"),
        (lambda: FedAvg(), "factory must be given"),
        (lambda: FedAvg(factory=Tiny(3)), "factory must be a function.*got a Tiny that is built already"),
        (lambda: FedAvg(factory=lambda: Tiny(3)), r"called as factory\(outputs\).*which takes \(\)"),
        (lambda: FedDM(factory=lambda a, b: Tiny(3)), r"called as factory\(outputs\).*which takes \(a, b\)"),
        (lambda: FedDM(factory={"a": Tiny, "b": Tiny}), "one architecture"),
        (lambda: FedAvg(factory={1: Tiny}), "names of architectures"),
        (
            lambda: FedAvg(factory={"a": Tiny, "b": Tiny(3)}, assign={0: "a"}),
            r"factory\['b'\] must be a function that makes",
        ),
        (lambda: FedAvg(factory="resnet"), r"called as factory\(outputs\).*got str"),
        (lambda: FedAvg(factory=Tiny, phases=[1]), "phases must be a list of `fl.Phase`"),
        (lambda: FedAvg(factory=Tiny, personal=3), "personal must be patterns"),
        (lambda: FedAvg(factory=Tiny, initial=torch.zeros(3)), "initial must be a state dict"),
        (lambda: FedAvg(factory=Tiny, augment=True), r"augment is called as augment\(images, generator\).*got bool"),
        (lambda: FedAvg(factory=Tiny, augment=lambda x: x), r"augment is called as augment\(images, generator\)"),
        (lambda: FedAvg(factory=Tiny, objective=nn.CrossEntropyLoss), "got the class CrossEntropyLoss itself"),
        (lambda: FedAvg(factory={"a": Tiny, "b": Tiny}, assign=["a", "b"]), r"assign is called as assign\(client\)"),
        (lambda: Phase(train=3), "train must be a string"),  # type: ignore[arg-type]
    ],
)
def test_objects_that_are_no_add_on_raise_a_type_error_with_advice(make: Any, error: str) -> None:
    refused(make, TypeError, error)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAvg(factory=Tiny, epochs=2, steps=3),
        lambda: FedAvg(factory=Tiny, epochs=1, phases=[Phase()]),
        lambda: FedAvg(factory=Tiny, steps=1, phases=[Phase()]),
        lambda: Phase(2, 3),
        lambda: Ditto(epochs=2, steps=3),
        lambda: FineTune(epochs=2, steps=3),
    ],
)
def test_epochs_and_steps_together_are_refused(make: Any) -> None:
    refused(make, ValueError, "epochs or steps")
    assert FedAvg(factory=Tiny, steps=3).settings.phases == (Phase(steps=3),)
    picture = torch.zeros(1, 8, 8, dtype=torch.uint8)
    small = {"keep": 2, "count": 2}
    assert SingleImage(picture, factory=Tiny, shared=small).settings.phases == (Phase(40),)
    assert SingleImage(picture, factory=Tiny, shared=small, steps=3).settings.phases == (Phase(steps=3),)


@pytest.mark.filterwarnings("error")
def test_extreme_learning_rate_is_warned_of() -> None:
    for make in (FedAvg, FedProto, lambda factory, lr: FedDM(factory=factory, server_lr=lr)):
        with pytest.warns(UserWarning, match=r"lr=1e\+09"):
            make(factory=Tiny, lr=1e9)
        refused(lambda make=make: make(factory=Tiny, lr=1e38), ValueError, "lr must be at most 1e37")  # type: ignore[misc]
    FedAvg(factory=Tiny, lr=1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda sigma: Filtered(FedAvg(factory=Tiny, weights="uniform"), ClientDP(sigma, 1.0, 1.0)),
        lambda sigma: FedAvg(DPSGD(sigma=sigma, rate=0.5, size=20), factory=Tiny, weights="uniform"),
        lambda sigma: PrivateFedDM(
            factory=Tiny, ipc=1, steps=1, server_epochs=1, num_networks=1, sigma=sigma, sizes=[5.0, 5.0, 5.0]
        ),
    ],
)
@pytest.mark.filterwarnings("error")
def test_private_methods_without_noise_warn(make: Any) -> None:
    with pytest.warns(UserWarning, match=r"\(sigma=0\) adds no noise: nothing is guaranteed, .* epsilon is None"):
        method = make(0.0)
    assert play(method).rows[0]["epsilon"] is None
    assert play(make(1.0)).rows[0]["epsilon"] > 0


# What runs, on what.


@pytest.mark.parametrize(
    ("method", "error"),
    [
        (FedAvg, r"got the class FedAvg: FedAvg\(\.\.\.\)"),
        (
            FedProx(0.1),
            r"^FedProx is a part of a method, not a method: pass FedAvg\(FedProx\(mu=0.1\), factory=\.\.\.\)$",
        ),
        (FedProx, r"^FedProx is a part of a method.* pass FedAvg\(FedProx\(\.\.\.\), factory=\.\.\.\)$"),
        (
            SharedImage(torch.rand(1, 9, 9), keep=2, count=3, clip=None),
            r"pass FedAvg\(SharedImage\(keep=2, clip=None, image=\.\.\., count=3\), factory=\.\.\.\)$",
        ),
        (
            ClientDP(1.0, 0.5, 2.0),
            r"^ClientDP is a part of a method, not a method: "
            r"pass Filtered\(FedAvg\(factory=\.\.\.\), ClientDP\(sigma=1.0, rate=0.5, clip=2.0\)\)$",
        ),
        (Tiny, r"got the class Tiny"),
        (Tiny(3), "method must be a federated method.*got Tiny"),
    ],
)
def test_objects_that_are_no_method_are_refused_with_advice(method: Any, error: str) -> None:
    refused(lambda: play(method), TypeError, error)
    refused(lambda: Filtered(method, ClientDP(1.0, 1.0, 1.0)), TypeError, error)


OTHER = Normalization((0.5,), (0.5,))


def other(**changes: Any) -> LabeledImages:
    return images(9, 40).replace(**changes)


def spoiled(value: float) -> LabeledImages:
    """Return a set with an image that was changed in place, after the set had been checked."""
    data = other()
    data.images[8].fill_(value)
    return data


MISFITS: dict[str, tuple[LabeledImages, str]] = {
    "space": (other(normalization=OTHER), r"different normalizations.*renormalize"),
    "shape": (other(images=torch.zeros(9, 1, 5, 5)), "different shapes"),
    "classes": (other(num_classes=7), r"different class counts.*replace\(num_classes"),
    "named classes": (other(num_classes=7, class_names=(*"abcdefg",)), r"different class counts.*replace\(num_classes"),
    "dtype": (images(9, 40).to(dtype=torch.float64), r"float64 images, clients\[0\] has torch.float32.*to\(dtype"),
    "labels": (other(labels=torch.eye(3)[images(9, 40).labels]), "labels as rows, clients.0. as class indices"),
    "NaN": (spoiled(torch.nan), r"must be finite, but 1 of 9 images hold NaN or Inf \(first: 8\)"),
    "Inf": (spoiled(torch.inf), r"must be finite, but 1 of 9 images hold NaN or Inf \(first: 8\)"),
}


@pytest.mark.parametrize("kind", MISFITS)
@pytest.mark.parametrize("method", [FedAvg(factory=Tiny), Real(factory=Tiny, ipc=1, server_epochs=1)])
def test_every_set_must_have_the_first_clients_space(kind: str, method: Any) -> None:
    odd, error = MISFITS[kind]
    fine = federation()
    places: dict[str, dict[str, Any]] = {
        "clients[4]": {"clients": (*fine[:4], odd)},
        "clients[2].test": {"clients": [*fine[:2], ClientData(fine[2], odd)]},
        "test": {"test": odd},
        "server_data['validation']": {"server_data": {"validation": odd}},
    }
    if kind in ("classes", "named classes", "labels"):  # a proxy set may be of other classes
        assert play(method, server_data={"proxy": odd}).rows[0]["failed"] == {}
    else:
        places["server_data['proxy']"] = {"server_data": {"proxy": odd}}
    for place, given in places.items():
        with pytest.raises(ValueError, match=error) as caught:
            play(method, **given)
        assert str(caught.value).startswith(place), place


def test_lazy_client_is_checked_when_drawn() -> None:
    class Made:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> LabeledImages:
            return other(normalization=OTHER) if number == 1 else images(9, number)

    for clients in (Made(), UserList([images(9, 0), other(normalization=OTHER), images(9, 2)])):
        row = play(clients=clients).rows[0]
        assert list(row["failed"]) == ["1"]
        assert "clients[1] does not fit clients[0]: clients[0] and clients[1] have different" in row["failed"]["1"]


TASK = {"num_classes", "single_label", "loss", "sums"}
ODD_TASKS = [type("Odd", (), dict.fromkeys(TASK - {name}, True))() for name in sorted(TASK)]
SEQUENCE = "clients must be a sequence of sets, one for each client, got "


@pytest.mark.parametrize(
    ("options", "kind", "error"),
    [
        ({"clients": {0: other()}}, TypeError, SEQUENCE + "dict"),
        ({"clients": other()}, TypeError, SEQUENCE + "LabeledImages"),
        ({"clients": [1]}, TypeError, r"clients\[0\] must be a LabeledImages, .*a pair of both"),
        ({"clients": [ClientData(other(), 3)]}, TypeError, r"clients\[0\].test must be a LabeledImages, .* got int"),  # type: ignore[arg-type]
        ({"evaluate": [0.5]}, TypeError, "evaluate must be 'drawn'"),
        ({"evaluate": {1: 2}}, TypeError, "clients' numbers, got dict$"),
        ({"participation": True}, TypeError, "participation must be a number, got bool$"),
        ({"on_round": 3}, TypeError, r"on_round is called as on_round\(row\)"),
        ({"on_round": lambda: None}, TypeError, r"on_round is called as on_round\(row\)"),
        ({"evaluate": [77]}, ValueError, r"from 0 to 4; got \[77\]"),
        ({"evaluate": []}, ValueError, r"got \[\]"),
        ({"evaluate": [-1]}, ValueError, r"each once, from 0 to 4; got \[-1\]"),
        ({"participation": 9}, ValueError, "asks for 9 clients, but there are 5"),
        ({"clients": []}, ValueError, "at least one set"),
        ({"evaluate": [1, 1]}, ValueError, r"each once"),
        ({"resume": True}, ValueError, "resume needs a folder: give out"),
        ({"device": "gpu"}, ValueError, "device must be one that this machine has, got 'gpu'"),
        ({"device": "meta"}, ValueError, "device must be one that this machine has, got 'meta'"),
        *(({"task": odd}, TypeError, "task must be an object.* got Odd") for odd in ODD_TASKS),
        ({"task": Classification(4)}, ValueError, "the task has 4 classes, the clients' sets have 3"),
        ({"task": MultiLabel(3)}, ValueError, r"MultiLabel\(num_classes=3\) needs labels as rows"),
        ({"min_replies": 3, "participation": 2}, ValueError, "min_replies is 3, but only 2 clients take part"),
        ({"ledger": Ledger()}, ValueError, "ledger is given, but the method is not private"),
        ({"secret": 3}, ValueError, "secret is given, but the method is not private"),
    ],
)
def test_invalid_arguments_are_named(options: dict[str, Any], kind: type[Exception], error: str) -> None:
    refused(lambda: play(**options), kind, error)


def test_label_rows_need_a_task() -> None:
    rows = [other(labels=torch.eye(3)[images(9, 40).labels])]
    refused(lambda: play(clients=rows), ValueError, r"labels are rows: pass task=MultiLabel")
    with pytest.raises(ValueError, match=r"needs labels as class indices \[N\], the clients have rows"):
        play(clients=rows, task=Classification(3))
    assert play(clients=rows, task=MultiLabel(3)).rows[0]["failed"] == {}


@pytest.mark.parametrize(("share", "clients", "drawn"), [
    (0.01, 5, 1), (0.29, 5, 1), (0.31, 5, 2), (0.69, 5, 3), (0.7, 5, 4), (0.89, 5, 4), (0.91, 5, 5), (1.0, 5, 5),
    (0.1, 16, 2),
])  # fmt: skip
def test_share_of_clients_is_rounded_to_the_nearest_number(share: float, clients: int, drawn: int) -> None:
    assert _drawn_count(share, clients, 1, drawn_by_method=False) == drawn


@pytest.mark.filterwarnings("error")
def test_one_client_and_all_clients_are_distinguished() -> None:
    with pytest.warns(UserWarning, match=r"participation=1 draws one of 5 clients .* all clients, pass .*=1\.0"):
        assert len(play(participation=1).rows[0]["drawn"]) == 1
    assert len(play(participation=1.0).rows[0]["drawn"]) == 5
    assert len(play(participation=1 / 5).rows[0]["drawn"]) == 1
    assert len(play(participation=1, clients=[images(9, 0)]).rows[0]["drawn"]) == 1


# Networks, patterns and functions are tried on noise.


class Wide(nn.Module):
    """Network with `outputs` logits for images of `side` x `side` for any requested shape."""

    def __init__(self, outputs: int, side: int = 4, repeat: float = 1.0) -> None:
        super().__init__()
        self.layer, self.repeat = nn.Linear(side * side, outputs), repeat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1)) * self.repeat


NETWORKS: list[tuple[Any, str]] = [
    (lambda k: Wide(10), r"factory\(3\) must return 3 logits, one per class of the data, but Wide returns 10"),
    (lambda k: Wide(2), "must return 3 logits, one per class of the data, but Wide returns 2"),
    (lambda k: Wide(k, side=8), r"factory\(3\) \(Wide\) does not accept images of the data's shape \(1, 4, 4\)"),
    (lambda k: Wide(k).double(), r"factory\(3\) must have the dtype and device of the images"),
    (lambda k: Wide(k, repeat=float("nan")), "returns NaN or Inf"),
    (lambda k: nn.Sequential(nn.Conv2d(1, k, 4), nn.Flatten()), "has no nn.Linear to use as classifier"),
]


@pytest.mark.parametrize(("network", "error"), NETWORKS)
def test_network_is_checked_on_noise_before_round_1(network: Any, error: str, global_rng_untouched: None) -> None:
    makes = [
        lambda: FedAvg(factory=network),
        lambda: FedDM(factory=network),
        lambda: Filtered(FedAvg(factory=network, weights="uniform"), ClientDP(1.0, 1.0, 1.0)),
    ]
    for make in makes:
        with pytest.raises(ValueError, match=error):
            play(make())
    with pytest.raises(ValueError, match=error.replace("factory", r"factory\['b'\]", 1)):
        play(FedProto(factory={"a": Tiny, "b": network}, assign=lambda k: "ab"[k % 2]))


class Free(nn.Module):
    """Network with a parameter outside its layers, as in transformers."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.rand(16)), nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1) * self.scale)


def test_networks_with_free_or_pretrained_parameters_run(global_rng_untouched: None) -> None:
    with pytest.raises(TypeError, match=r"has its own parameters; .* keep the constructor's weights with KeepInit"):
        play(FedAvg(factory=Free))
    for method in (FedAvg, FedProto, lambda factory: FedDM(factory=factory, ipc=1, steps=1, server_epochs=1)):
        assert play(method(factory=KeepInit(Free))).rows[0]["failed"] == {}
    one, again = (play(FedAvg(factory=KeepInit(Free)), seed=3).server.state[FedAvg.model] for _ in range(2))
    assert all(torch.equal(t, again[n]) for n, t in one.items())
    with torch.random.fork_rng():
        net = Free(3)
    kept = play(FedAvg(factory=KeepInit(lambda outputs: copy.deepcopy(net)), lr=1e-9)).server.state[FedAvg.model]
    assert torch.allclose(kept["scale"], net.scale, atol=1e-6)


def test_copy_of_a_network_shares_nothing_with_the_original() -> None:
    template = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    found: dict[str, int] = {}
    for module in template:
        module.found, module.seen = found, {"a": []}  # type: ignore[assignment]
    template[0].noted = nn.ReLU().state_dict()  # empty, yet with an attribute
    twin = copy.deepcopy(template, _blanks(template, template.state_dict()))
    plain = copy.deepcopy(template)
    for ours, theirs, own in zip(twin.modules(), plain.modules(), template.modules(), strict=True):
        assert [(n, type(v)) for n, v in vars(ours).items()] == [(n, type(v)) for n, v in vars(theirs).items()]
        shared = {n for n, v in vars(ours).items() if v is vars(own)[n] and isinstance(v, dict | set | list)}
        assert not shared
    twin[0].register_forward_hook(lambda *_: None)
    twin[0].found["a"] = 1  # type: ignore[index, operator]
    assert not template[0]._forward_hooks
    assert not template[0].found
    assert twin[1].found == {"a": 1}
    assert vars(twin[0].noted) == vars(template[0].noted) != {}


def test_state_outside_the_state_dict_does_not_leak_between_clients() -> None:
    steps: list[tuple[int, float, int]] = []

    class Counting(Tiny):
        def __init__(self, outputs: int) -> None:
            super().__init__(outputs)
            self.calls, self.kept = 0, {"calls": 0}
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def features(self, images: torch.Tensor) -> torch.Tensor:
            if self.training:
                steps.append((self.calls, float(self.seen), self.kept["calls"]))
            self.calls, self.kept["calls"], self.seen = self.calls + 1, self.kept["calls"] + 1, self.seen + 1
            return super().features(images)

    clients = [images(8, seed) for seed in range(4)]
    rows = play(FedAvg(factory=Counting, batch=4), clients, rounds=2, workers=1).rows
    assert all(row["failed"] == {} for row in rows)
    first = steps[-2][0]  # what the trial before round 1 left in the template, which all of them are copies of
    own = [(first + step, float(first + step), first + step) for step in range(2)]
    assert steps[-16:] == own * 8


@pytest.mark.parametrize("buffers", ["mean", "local", "drop"])
def test_non_persistent_buffers_are_not_sent_or_saved(buffers: Any) -> None:
    class Masked(Tiny):
        def __init__(self, outputs: int) -> None:
            super().__init__(outputs, norm=True)
            self.register_buffer("mask", torch.ones(4, 4), persistent=False)
            self.register_buffer("places", torch.arange(3), persistent=False)

        def features(self, images: torch.Tensor) -> torch.Tensor:
            return super().features(images * self.mask)

    found, plain = (
        play(FedAvg(factory=factory, buffers=buffers, batch=4))
        for factory in (Masked, lambda outputs: Tiny(outputs, True))
    )
    assert found.rows[0]["failed"] == {}
    state, wanted = found.server.state[FedAvg.model], plain.server.state[FedAvg.model]
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[n], wanted[n]) for n in state)


def test_extra_outputs_of_add_ons_are_counted() -> None:
    from fl.addons import VHL

    noise = images(20, 9)
    virtual = VHL(source=noise, classes=3, batch=4)
    refused(lambda: play(FedAvg(virtual, factory=lambda k: Tiny(3))), ValueError, r"factory\(6\) must return 6 logits")
    assert play(FedAvg(virtual, factory=Tiny)).rows[0]["failed"] == {}


def deep(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, outputs))


TWO: dict[str, Any] = {"factory": {"a": Tiny, "b": deep}, "assign": lambda k: "ab"[k % 2]}
NAMES = "body.0.weight, body.0.bias, body.1.weight, body.1.bias, classifier.weight, classifier.bias"
KNOWN = f"matches no parameter; there are {NAMES}"
DEEP = KNOWN.replace(NAMES, ", ".join(f"{n}.{kind}" for n in (1, 2, 3) for kind in ("weight", "bias")))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"personal": "classifer.*"}, r"personal: the pattern 'classifer.\*' matches no parameter"),
        ({"kind": FedRep, "head": "classifer.*"}, r"personal: the pattern 'classifer.\*' matches no parameter"),
        ({"phases": [Phase(train="boddy.*")]}, r"Phase\(train=...\): the pattern 'boddy.\*'"),
        ({"phases": [Phase(train="!classifer.*")]}, "matches no parameter"),
        ({"factory": network, "personal": "classifer.*"}, rf"^personal: the pattern 'classifer.\*' {KNOWN}$"),
        ({"factory": network, "phases": [Phase(train="!bd")]}, rf"^Phase\(train=...\): the pattern '!bd' {KNOWN}$"),
        ({"kind": FedRep, "factory": deep, "head": "a"}, rf"^personal: the pattern 'a' {DEEP}, \.\.\.$"),
        ({"phases": [Phase(train="!*")]}, r"^Phase\(.*train='!\*'\) trains no parameter: its pattern excludes all"),
        ({**TWO, "phases": [Phase(), Phase(train="body.*")]}, "trains no parameter of architecture 'b': its pattern"),
        ({"personal": "*"}, r"^personal=\('\*',\) keeps every parameter with its client: none is averaged; give "),
        (
            {**TWO, "personal": ["[1-4].*"]},
            r"^personal=\('\[1-4\].\*',\) keeps every parameter of architecture 'b' with its ",
        ),
        ({"initial": {"classifier.bias": torch.zeros(4)}}, r"float32 \[3\], got torch.float32 \[4\]"),
        ({"initial": {"classifier.bias": [0.0]}}, r"initial\['classifier.bias'\] must be .* got list"),
        ({"augment": lambda x, g: x[:1]}, r"^augment must return torch.float32 \[2, 1, 4, 4\] .*32 \[1, 1, 4, 4\]$"),
        ({"augment": lambda x, g: x @ torch.ones(5, 5)}, r"^augment fails .*, \[2, 1, 4, 4\]: RuntimeError: .*5x5\)$"),
        (
            {"augment": lambda x, g: x.double()},
            r"^augment must return torch.float32 .* got torch.float64 \[2, 1, 4, 4\]$",
        ),
        ({"augment": lambda x, g: x.numpy()}, "for such images, got ndarray$"),
        (
            {"augment": lambda x, g: x.clone().fill_(torch.inf)},
            "^augment must return finite images, but returns NaN or",
        ),
        ({"objective": nn.CrossEntropyLoss(reduction="none")}, r"^objective must return one .*; got a tensor \[2\]$"),
        ({"objective": lambda z, y: z.sum()[None]}, r"; got a tensor \[1\]$"),
        ({"objective": lambda z, y: z.sum().detach()}, r"; got a tensor \[\] without a gradient$"),
        ({"objective": lambda z, y: 3.0}, "; got float without a gradient$"),
        ({"objective": lambda z, y: z.square().sum() * torch.inf}, "a finite number for finite logits, got inf$"),
        ({"objective": lambda z, y: z[:, 9].sum()}, r"^objective fails on logits \[2, 3\] and .* labels: IndexError: "),
        ({"addons": [FineTune(train="classifer.*")]}, r"FineTune\(train=...\): the pattern 'classifer"),
    ],
)
def test_patterns_and_functions_are_checked_before_round_1(options: dict[str, Any], error: str) -> None:
    given = {"factory": Tiny, **options}
    method = given.pop("kind", FedAvg)(*given.pop("addons", ()), **given)
    refused(lambda: play(method), ValueError, error)


def test_augmentation_is_tried_on_images_of_the_clients_dtype() -> None:
    held = [data.to(dtype=torch.float64) for data in federation()]
    play(FedAvg(factory=lambda k: Tiny(k).double(), augment=lambda x, g: x.double()), clients=held, test=None)


@pytest.mark.parametrize("task", [Classification(3), MultiLabel(3)])
def test_augmentation_and_objective_are_tried_on_values_like_the_clients(task: Any) -> None:
    """The logits have an output of an add-on, but the labels are only the task's."""
    seen: list[Any] = []

    class Wider(AddOn):
        extra_outputs = 1

    def objective(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append((logits.dtype, list(logits.shape), labels.dtype, labels.tolist()))
        return task.loss(logits[:, :3], labels)

    held = [data.to(dtype=torch.float64) for data in federation()]
    if not task.single_label:
        held = [data.replace(labels=torch.eye(3, dtype=torch.float64)[data.labels]) for data in held]
    method = FedAvg(
        Wider(), factory=lambda k: Tiny(k).double(), augment=lambda x, g: x.double(), objective=objective, batch=99
    )  # fmt: skip
    play(method, clients=held, task=task, test=None)
    labels = [0, 2] if task.single_label else [[1, 0, 0], [0, 0, 1]]
    kind = torch.int64 if task.single_label else torch.float64
    assert seen[:2] == [(torch.float64, [2 * n, 4], kind, labels * n) for n in (1, 2)]


@pytest.mark.parametrize(
    ("addon", "first"),
    [
        (FedCOG(), 51),
        (FedCOG(start_round=4), 4),
        (MOON(), 2),
        (SCAFFOLD(), 2),
        (Anchors(ipc=1, steps=1), 2),
        (FedGen(), 2),
    ],
)
def test_add_on_that_never_acts_is_warned_of_before_round_1(addon: Any, first: int) -> None:
    name = type(addon).__name__
    seen: list[int] = []
    with pytest.warns(UserWarning, match=f"{name} changes nothing before round {first}, and the run has 1"):
        ours = play(FedAvg(addon, factory=Tiny), on_round=lambda row: seen.append(row["round"]))
    theirs = play()
    assert seen == [1]
    for tensor, plain in zip(
        ours.server.state[FedAvg.model].values(), theirs.server.state[FedAvg.model].values(), strict=True
    ):
        assert torch.equal(tensor, plain)
    assert addon.first_round == first


@pytest.mark.filterwarnings("error")
def test_add_ons_that_act_from_round_1_do_not_warn() -> None:
    play(FedAvg(FedProx(0.1), Condensed(ipc=1, steps=1), factory=Tiny))
    play(FedAvg(FedCOG(start_round=1, images=2, steps=1), factory=Tiny))


# Other holders of images, and NumPy's numbers.


class Lazily(torch.utils.data.Dataset[Any]):
    """Dataset of pixels 0..255 and labels that counts reads of each item."""

    def __init__(self, count: int, seed: int) -> None:
        data = images(count, seed)
        self.pixels, self.labels = (data.images * 40 + 100).clamp(0, 255).to(torch.uint8), data.labels
        self.read = [0] * count

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read[index] += 1
        return self.pixels[index], int(self.labels[index])


def test_datasets_and_pairs_are_read_once_and_give_equal_runs() -> None:
    held = [Lazily(9, k) for k in range(3)]
    clients = [LabeledImages(d.pixels.float() / 255, d.labels, num_classes=3) for d in held]
    test = Lazily(20, 8)
    plain = LabeledImages(test.pixels.float() / 255, test.labels, num_classes=3)
    wanted = play(clients=clients, test=plain, rounds=2)
    given: list[Any] = [*held[:2], (held[2].pixels.numpy(), held[2].labels.numpy())]
    for lot, task in ((given, Classification(3)), ([clients[0], *given[1:]], None), (given, None)):
        run = play(clients=lot, test=test, task=task, rounds=2)
        for name, tensor in run.server.state[FedAvg.model].items():
            assert torch.equal(tensor, wanted.server.state[FedAvg.model][name])
        assert run.accuracy_last == wanted.accuracy_last
    assert held[1].read == [3] * 9
    assert test.read == [3] * 20


def test_set_without_num_classes_gets_that_of_the_others() -> None:
    full = images(9, 3)
    few = LabeledImages(full.images[full.labels < 2], full.labels[full.labels < 2])
    assert few.num_classes == 2
    run = play(clients=[few, full, ClientData(few, few)])
    assert run.server.task == Classification(3)
    assert run.rows[0]["failed"] == {}
    said = r"clients\[1\] does not fit clients\[0\]: .*class counts: 2 and 3"
    refused(lambda: play(clients=[few.replace(num_classes=2), full]), ValueError, said)
    assert play(clients=[few], test=few, task=Classification(4)).server.task == Classification(4)
    assert all(
        ClientRegistry([few, *others], classes).first.classes_given for others, classes in (((), 4), ((full,), None))
    )
    names = ("a", "b", "c")
    found = list(ClientRegistry([few, few.replace(class_names=names[:2]), full.replace(class_names=names)]))
    assert [(data.train.num_classes, data.train.class_names) for data in found] == [(3, names)] * 3
    inferred = [LabeledImages(data.images, data.labels) for data in (few, full)]
    assert [(d.train.num_classes, d.train.classes_given) for d in ClientRegistry(inferred)] == [(3, False)] * 2
    found = list(ClientRegistry([few.replace(class_names=names[:2]), full]))  # no names of all classes are known
    assert [(data.train.num_classes, data.train.class_names) for data in found] == [(3, ())] * 2
    said = r"clients\[1\] does not fit clients\[0\]: .*class counts: 2 and 3"
    refused(lambda: ClientRegistry([few.replace(num_classes=2), inferred[1]]), ValueError, said)
    assert not list(ClientRegistry([full, inferred[1]]))[1].train.classes_given
    sorted_as_text = [full.replace(class_names=("1", "10", "2"))]
    assert play(clients=sorted_as_text, server_data={"proxy": full}).rows[0]["failed"] == {}
    refused(lambda: play(clients=sorted_as_text, test=full), ValueError, "^test does not fit .* 10")
    turned = [few.replace(class_names=("b", "a")), full.replace(class_names=names)]
    refused(
        lambda: ClientRegistry(turned), ValueError, "the sets have the class 'a' in another order: a, b, c and b, a"
    )


SMALL = images(6, 3)
CLASSES, LABELS = Classification(3), MultiLabel(3)
INDEX, LOGITS = torch.tensor([0, 1]), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: embedding_size(Tiny(3), [SMALL.images]), "images must be"),
        (lambda: embedding_size(Tiny(3), SMALL.images.repeat(1, 2, 1, 1)), "network .* does not accept images"),
        (lambda: require_single_label("FedX", Classification), "task must be"),
        (lambda: CLASSES.counts(torch.tensor([3])), "labels must be below"),
        (lambda: CLASSES.sums(LOGITS, INDEX[:1]), "labels must be"),
        (lambda: CLASSES.sums(LOGITS, INDEX + 2), "labels must be below"),
        (lambda: CLASSES.metrics(torch.zeros(3)), "sums must be"),
        (lambda: LABELS.counts(INDEX), "labels must be"),
        (lambda: LABELS.sums(LOGITS, INDEX), "labels must be"),
    ],
)
def test_direct_calls_name_the_wrong_argument(call: Any, words: str) -> None:
    refused(call, (TypeError, ValueError, IndexError), f"^{words}")


def test_numpy_numbers_continue_the_same_run(tmp_path: Path) -> None:
    plain = play(rounds=2, participation=2, seed=3, evaluate=[1, 2])
    play(participation=2, seed=3, evaluate=[1, 2], out=tmp_path)
    numbers = {"rounds": np.int64(2), "participation": np.int32(2), "seed": np.int64(3), "evaluate": np.array([1, 2])}
    run = play(**numbers, out=tmp_path, resume=True)
    assert [r["drawn"] for r in run.rows] == [r["drawn"] for r in plain.rows]
    assert len(play(participation=np.float32(0.4)).rows[0]["drawn"]) == 2
