"""User code that holds private records, in whatever way, is refused before a charge; the set itself never changes."""

from __future__ import annotations

import functools
import weakref
from collections import UserList
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit.networks import ConvNet, FixedNetwork, KeepInit, NetworkBall, NetworkSampler, RandomNetworks
from distillkit.normalization import Normalization
from distillkit.privacy import (
    Account,
    EmbeddingNetworks,
    Ledger,
    NotCapturable,
    Passes,
    PrivateInitialization,
    PublicEmbedder,
    PublicEmbedders,
    TrainedNetworks,
    class_sums,
    condense_private,
    image_sgd,
    separable,
    train_private,
)
from distillkit.privacy.validation._private_records import (
    PrivateRecords,
    active_records,
    apart_from_records,
    declare_records,
)
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from distillkit.training import Protocol
from fl import ClientDP, FedAvg, Filter, Filtered, simulate
from fl.addons import DPSGD
from tests.refused import refused

PIXELS = torch.randint(0, 256, (12, 2, 8, 8), generator=derive(0), dtype=torch.uint8)
SPACE = Normalization((0.5, 0.4), (0.25, 0.3))
AGES = torch.rand(12, generator=derive(1))
PARENT = LabeledImages.from_pixels(
    PIXELS, torch.arange(12) % 3, num_classes=3, normalization=SPACE, columns={"age": AGES}
)
DATA = PARENT[:10]
DOUBLE = DATA.to(dtype=torch.float64)
OTHER = DATA.renormalize(Normalization((0.1, 0.1), (1.0, 2.0)))
ARRAY = PIXELS.movedim(1, -1).numpy()[::-1]
LABELS = DATA.labels.numpy()


class Holding(nn.Module):
    """Linear classifier of images that first applies a function of (module, images), and holds further objects."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor] = lambda m, x: x, **held: Any) -> None:
        super().__init__()
        self.function, self.head = function, nn.Linear(128, 3)
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def features(self, x: Tensor) -> Tensor:
        return self.function(self, x).flatten(1)

    def classifier(self, z: Tensor) -> Tensor:
        return self.head(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def unused(self) -> Any:
        return DATA


class Scoring(Holding):
    """Network whose classifier, which `forward` does not call, reads the records."""

    def classifier(self, z: Tensor) -> Tensor:
        return self.head(z) * float(ARRAY.mean())


class Multiplying(Holding):
    """Network whose `forward`, which `features` does not call, reads the records."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)) * float(ARRAY.mean())


class Reading(Holding):
    """Network whose own method reads the records; a subclass inherits it."""

    def features(self, x: Tensor) -> Tensor:
        return (lambda: self.shifted(x))().flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))

    def shifted(self, x: Tensor) -> Tensor:
        return x - float(ARRAY.mean())


class Weighted:
    """Loss whose weight is computed from the records."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits * DATA.images.mean(), labels, reduction="none")


class Inheriting(Reading):
    """Network without a method of its own."""


def centred(module: Any, x: Tensor) -> Tensor:
    return x - module.bank.mean(0)


def by_attribute(module: Any, x: Tensor) -> Tensor:
    return x * float(vars(by_attribute)["bank"].mean())


vars(by_attribute)["bank"] = ARRAY


def shifted(bank: Tensor, module: Any, x: Tensor) -> Tensor:
    return x - bank.mean(0)


def closing(first: Tensor, second: Tensor) -> nn.Module:
    return Holding(lambda m, x: x - first - second.mean(0))


def weights_of(network: nn.Module, layer: str, rows: Tensor) -> nn.Module:
    network.get_submodule(layer).weight.data = rows  # type: ignore[union-attr, assignment]
    return network


def hooked() -> nn.Module:
    network = Holding()
    network.head.register_forward_pre_hook(lambda m, inputs: (inputs[0] - OTHER.images.flatten(1).mean(0),))
    return network


HOLDING: dict[str, Callable[[], nn.Module]] = {
    "buffer": lambda: Holding(centred, bank=DATA.images),
    "copied buffer": lambda: Holding(centred, bank=DATA.images.clone()),
    "parameter": lambda: Holding(centred, bank=nn.Parameter(DATA.images)),
    "parameter of one record": lambda: Holding(centred, bank=nn.Parameter(DATA.images[3:4].clone())),
    "weights": lambda: weights_of(Holding(), "head", DATA.images.flatten(1)[:3].clone()),
    "weights of own layers": lambda: weights_of(
        nn.Sequential(nn.Flatten(), nn.Linear(128, 3)), "1", DATA.images.flatten(1)[:3].clone()
    ),
    "columns of weights": lambda: Holding(bank=OTHER.images.flatten(1).T.contiguous()),
    "labels": lambda: Holding(lambda m, x: x * m.bank.sum(), bank=DATA.labels),
    "column": lambda: Holding(lambda m, x: x * m.bank.sum(), bank=DATA.columns["age"]),
    "closure": lambda: closing(torch.zeros(1), DATA.images),
    "closure of the parent": lambda: Holding(lambda m, x: x - PARENT.images.mean(0)),
    "number of records": lambda: Holding(lambda m, x: x * len(DATA)),
    "global": lambda: Holding(lambda m, x: x * DOUBLE.images.mean().float()),
    "default": lambda: Holding(lambda m, x, bank=ARRAY: x * float(bank.mean())),
    "keyword default": lambda: Holding(lambda m, x, *, bank=ARRAY: x * float(bank.mean())),
    "attribute of a function": lambda: Holding(by_attribute),
    "partial": lambda: Holding(functools.partial(shifted, OTHER.images)),
    "array": lambda: Holding(lambda m, x: x * float(ARRAY.mean())),
    "attribute": lambda: Holding(lambda m, x: x - m.held["a"][0].images.mean(0), held={"a": [OTHER]}),
    "labels as an array": lambda: Holding(lambda m, x: x * float(LABELS.sum())),
    "base class": lambda: Inheriting(),
    "classifier": lambda: Scoring(),
    "forward": lambda: Multiplying(),
    "pixels": lambda: Holding(lambda m, x: x - PIXELS.float().mean(0)),
    "half precision": lambda: Holding(lambda m, x: x - m.held[0].float(), held=[DATA.images[2].bfloat16()]),
    "hook": hooked,
}


def train(network: nn.Module, ledger: Ledger, **options: Any) -> None:
    train_private(network, DATA, size=10, sigma=1.0, rate=0.5, steps=1, ledger=ledger, **options)


train_by_opacus = functools.partial(train, gradients="opacus")


def condense(networks: NetworkSampler, ledger: Ledger, **options: Any) -> None:
    options |= {"num_networks": 1, "steps": 1, "ipc": 1, "passes": Passes(first_num_networks=1, first_steps=1)}
    condense_private(DATA, epsilon=1.0, networks=networks, ledger=ledger, **options)


def steps(networks: NetworkSampler, ledger: Ledger) -> None:
    image_sgd(DATA, size=10, sigma=1.0, networks=networks, steps=1, ipc=1, ledger=ledger)


def sums(networks: NetworkSampler, ledger: Ledger) -> None:
    class_sums(*DATA, PublicEmbedders(networks, 1, like=DATA), num_classes=3)


@pytest.mark.parametrize("entry", [train, train_by_opacus, condense, steps, sums])
def test_network_that_holds_records_is_refused(entry: Callable[..., None]) -> None:
    before, ledger, trained = [t.clone() for t in PARENT], Ledger(), (train, train_by_opacus)
    for name, make in HOLDING.items():
        if entry is sums and name == "column":
            continue
        network = make()
        with pytest.raises(NotCapturable, match=r"the records themselves|a copy of a private record"):
            entry(network if entry in trained else FixedNetwork(network), ledger)
    if entry in trained:
        refused(lambda: entry(Holding(), ledger, loss=Weighted()), NotCapturable, "or its loss uses the")
    if entry is train:  # constants that no object reaches
        copies = [torch.zeros(1, 2, 8, 8), DATA.images.clone()]
        public, private = map(weakref.ref, copies)
        network = Holding(lambda m, x: x - public() - private().mean(0))  # type: ignore[operator]
        refused(lambda: entry(network, ledger), NotCapturable, "a copy of a private record")
    assert ledger.events == ()
    assert all(torch.equal(a, b) for a, b in zip(before, PARENT))
    early = Holding(lambda m, x: x if isinstance(x, Tensor) else public())  # a variable that only `train` has assigned
    named = Holding(lambda m, x: x * m.AGES, AGES=torch.ones(1))  # as a global variable that holds records
    for network in (early, named, Holding(centred, bank=torch.randn(5, 2, 8, 8, generator=derive(1)))):
        entry(network if entry in trained else FixedNetwork(network), ledger)


def test_sampler_that_uses_records_is_refused() -> None:
    """A factory may read the shape of the set, but nothing else."""
    protocol, ledger = Protocol(epochs=1), Ledger()

    def factory() -> nn.Module:
        return ConvNet((DATA.images.shape[1], *DATA.images.size()[2:]), DATA.num_classes, width=2, depth=1)

    copied = LabeledImages.from_pixels(PIXELS, torch.arange(12) % 3, num_classes=3, normalization=SPACE)
    for data, words in ((DATA, "uses the records"), (PARENT[5:], "uses the records"), (copied, "holds a copy")):
        networks = TrainedNetworks(factory, data, protocol, progress=False)
        refused(lambda n=networks: condense(n, ledger), NotCapturable, f"the sampler TrainedNetworks {words}")
    sampler = RandomNetworks(KeepInit(lambda: Holding(centred, bank=torch.cat(tensors=(DATA.images,)))))
    refused(lambda: condense(sampler, ledger), NotCapturable, "the sampler RandomNetworks uses the records")
    pixels = DATA.images.flatten(1)[:3].numpy().copy()
    own = lambda: weights_of(nn.Sequential(nn.Flatten(), nn.Linear(128, 3)), "1", torch.from_numpy(pixels))  # noqa: E731
    classified = lambda: weights_of(ConvNet((2, 8, 8), 3, width=32, depth=2), "classifier", torch.from_numpy(pixels))  # noqa: E731
    for make, place in ((own, "1.weight"), (classified, "classifier.weight")):
        fresh = type("Fresh", (), {"fixed": False, "draw": lambda self, generator, make=make: make()})()
        words = rf"the network .* holds a copy of a private record \((layers\.)?{place}\)"
        refused(lambda s=fresh: condense(s, ledger), NotCapturable, words)
    shown = PublicEmbedders(RandomNetworks(factory), 1, like=DATA, centers=DATA.images[:3])
    words = r"the argument uses the records themselves .*\(centers"
    refused(lambda: class_sums(*DATA, shown, num_classes=3), NotCapturable, words)
    for init in (DATA[:3], OTHER[:3].renormalize(SPACE), DATA[:3].to(dtype=torch.float64)):
        with pytest.raises(PrivateInitialization, match="an image of the private set"):
            condense(RandomNetworks(factory), ledger, init=init)
    assert ledger.events == ()
    condense(RandomNetworks(factory), ledger)
    condense(NetworkBall(factory(), 1.0), ledger)


def test_optimizer_that_reads_records_is_refused() -> None:
    class Reading(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.param_groups[0]["params"][0].data.add_(read())

    held, words = nn.Parameter(DATA.images), r"the optimizer uses the records .*\(an argument of (stack|shape|mean) "
    for reading in (lambda: torch.stack([DATA.images]).mean(), lambda: DATA.images.shape[0], held.mean):
        read = reading
        for optimizer in (lambda p: Reading(p, lr=0.1), lambda p, lr=reading: torch.optim.SGD(p, lr=float(lr()))):
            refused(lambda o=optimizer: train(Holding(), Ledger(), optimizer=o), NotCapturable, words)


def test_callback_cannot_add_records_to_a_release() -> None:
    def run(callback: Callable[[int, Tensor], Any]) -> Tensor:
        networks = RandomNetworks(lambda: ConvNet(DATA.shape, 3, width=2, depth=1))
        options: dict[str, Any] = {"networks": networks, "ledger": Account(Ledger(), secret=0), "callback": callback}
        return image_sgd(DATA, size=10, sigma=1.0, steps=1, ipc=1, **options).images

    def ask(step: int, gradient: Tensor) -> None:
        assert [getattr(DATA.images, n) for n in ("dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")]
        assert [DATA.images.dim(), len(DATA.images.shape), DATA.images.is_floating_point()] == [4, 4, True]

    assert torch.equal(run(lambda step, gradient: gradient.zero_()), run(ask))
    with pytest.raises(NotCapturable, match="the callback uses the records"):
        run(lambda step, gradient: gradient.add_(DATA.images.mean()))


@pytest.mark.parametrize("held", [lambda data: data.images, lambda data: data.labels, lambda data: data.columns["age"]])
def test_client_whose_network_holds_its_records_fails(held: Callable[[LabeledImages], Tensor]) -> None:
    """The graph that another client captured is compared with the records of this client, too."""
    clients = [PARENT[[*range(10)]], PARENT[[10, 11]]]
    second = held(clients[1])

    def factory(outputs: int) -> nn.Module:
        return Holding(lambda m, x: x - second.float().mean(0))

    class Own(ConvNet):
        bank = clients

        def __init__(self, outputs: int) -> None:
            super().__init__(DATA.shape, outputs, width=2, depth=1)
            self.register_buffer("copy", held(self.bank[0]).double())

    class Closing(ConvNet):
        def __init__(self, outputs: int) -> None:
            super().__init__(DATA.shape, outputs, width=2, depth=1)
            self.shift = float(held(clients[0]).sum())

    private = DPSGD(sigma=1.0, rate=0.5, size=10)
    method = FedAvg(private, factory=factory, weights="uniform", steps=1)
    assert list(simulate(method, UserList(clients), rounds=1, progress=False).rows[0]["failed"]) == ["1"]
    reading = FedAvg(
        DPSGD(sigma=1.0, rate=0.5, size=10, gradients="opacus"), factory=partial(ConvNet, DATA.shape), steps=1,
        weights="uniform", objective=lambda z, y: F.cross_entropy(z * held(clients[0]).sum(), y),
    )  # fmt: skip
    building, made = (FedAvg(private, factory=kind, weights="uniform", steps=1) for kind in (Own, Closing))
    plain = FedAvg(factory=partial(ConvNet, DATA.shape), weights="uniform")
    holding = Filtered(plain, type("Own", (Filter,), {"bank": second})(), ClientDP(1.0, 0.5, 1.0))
    for one in (method, reading, building, made, holding):  # if all clients are in memory, before round 1
        call = partial(simulate, one, clients, rounds=1, progress=False)
        refused(call, NotCapturable, "^the method FedAvg uses the records themselves .* shares")


@pytest.mark.parametrize("side", [4, 2])
def test_contents_are_compared_up_to_contrast_and_rounding(side: int) -> None:
    images = torch.rand(600, 3, 2, side, generator=derive(2))
    apart = (0.01 if side == 4 else 0.02) * torch.randn(2, 3, 2, side, generator=derive(4))
    images[5] = images[4] + apart[0]  # nearly the same record, and not the same
    images[3, 1], images[20], images[21] = 0.7, 0.0, torch.inf
    records = PrivateRecords([images], content=True)
    assert all(records.contain(one.clone()) for one in (*images[:9], images[-1], images[:4].to_sparse(), 1j * images))
    assert not records.contain(images[4] + apart[1])
    default = torch.get_default_dtype()
    try:  # another default number type changes nothing
        torch.set_default_dtype(torch.float64)
        assert records.contain(images[4].bfloat16())
    finally:
        torch.set_default_dtype(default)
    assert not records.contain(torch.rand(300, 3, 2, side, generator=derive(3)))
    assert not records.contain(torch.zeros(2, 3, 2, side).to_sparse())
    assert records.contain(2 * images[:2].double() - 1) == (side == 4)
    with torch.autocast("cpu"):
        assert records.contain(torch.cat([torch.ones(4099, 3, 2, side), images[4:5]]))
    assert not PrivateRecords([images], content=False).contain(images)


class Counting(nn.Module):
    """Linear network that counts how often its code runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(128, 3), [0]

    def features(self, x: Tensor) -> Tensor:
        Counting.count += 1
        return x.flatten(1)

    def classifier(self, z: Tensor) -> Tensor:
        return self.head(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    count = 0


@pytest.mark.parametrize("place", ["network", "augmentation", "constant"])
def test_code_that_was_captured_before_the_records_were_declared_is_compared(place: str) -> None:
    """The number of records is a constant of the graph, so only the code shows where it came from."""
    copy = DATA.images.clone()
    reference = weakref.ref(copy)  # which leads to no object that could be followed
    constant = lambda m, x: x - reference().mean(0)  # type: ignore[union-attr]  # noqa: E731
    counted = lambda m, x: x * len(DATA)  # noqa: E731
    network = Holding(*{"network": (counted,), "constant": (constant,)}.get(place, ()))
    augment = (lambda x, generator, siamese: x * len(DATA)) if place == "augmentation" else None
    embedder = PublicEmbedder(network, None, augment=augment)  # type: ignore[arg-type]
    embedder.prepare(torch.zeros(1, 2, 8, 8), gradients=True)
    for use in (
        lambda: embedder.embed_private(DATA.images),
        lambda: embedder.pull_back(torch.zeros(1, 2, 8, 8), batched=False)(torch.zeros(3, 128)),
    ):
        again = apart_from_records()(lambda use=use: (declare_records(*DATA), use()))
        refused(again, NotCapturable, "^the network Holding (uses the records|holds a copy)")
        use()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_of_several_sets_of_one_shape_is_compared(order: tuple[int, int]) -> None:
    """Whichever was compared first: `joined` declares, for example, a client's training and test images."""
    sets = [torch.randn(5 + i, 3, 8, 8, generator=derive(i, "several")) for i in range(2)]
    records = PrivateRecords([sets[0]], content=True).joined([sets[0], sets[1]])
    assert not records.contain(torch.randn(4, 3, 8, 8, generator=derive(7)))
    for part in (sets[0][..., :5], sets[0][..., :3, :3]):  # the second are cubes, which may be read in two ways
        alone = PrivateRecords([part], content=True)
        assert all(alone.contain(one) for one in (part[2:], part[3], part.movedim(1, -1), part[3].movedim(0, -1)))
        assert not alone.contain(part[:0])
    for i in order:
        assert all(records.contain(image[None].clone() * 2 + 1) for image in sets[i])
        assert records.share(sets[i][3:4])
    rows = np.zeros((9, 8), dtype=np.float32)
    beside = PrivateRecords([torch.from_numpy(rows[2:-2])], content=False)
    parts = [torch.from_numpy(part) for part in (rows[1:3], rows[-3:], rows[:2], rows[-2:], rows[4:4])]
    shared = [beside.share(part) for part in (torch.from_numpy(rows)[4:5], *parts, parts[0].to_sparse())]
    assert shared == [True, True, True, False, False, False, False]
    passed = Holding()
    kept = weakref.ref(passed)
    records.refuse_reachable(passed, "it")
    del passed
    assert kept() is not None  # so no other object takes its place
    beside.refuse_reachable(parts, "it")  # which is for contents
    assert not beside.joined(sets).content
    for held in sets:
        for shown, words in (
            (nn.Parameter(held[:1]), r"uses the records .*\(second shares"),
            (held + 0, r"a copy .* \(second\)"),
            (nn.Parameter(held[1:2] + 0), r"a copy .* \(second\)"),
        ):
            both = [("first", torch.zeros(1)), ("second", shown)]
            refused(lambda b=both: records.refuse(b, "it"), NotCapturable, words)
            for part in (shown, shown.detach()):  # as a parameter and as a buffer
                refused(lambda p=part: records.refuse_state(Holding(second=p), "it"), NotCapturable, words)
            place = words.replace("second", r"it\['a'\]\._(parameters|buffers)\['second'\]")
            refused(lambda s=shown: records.refuse_reachable([0, {"a": Holding(second=s)}], "it"), NotCapturable, place)
        again = [held]
        for _ in range(2):
            refused(lambda r=again: records.refuse_reachable(r, "it"), NotCapturable, "it uses the records")


def test_user_code_runs_as_often_whatever_records_are_drawn() -> None:
    counts, augmented = set(), set()

    @separable
    def cubed(embedding: Tensor, means: Tensor) -> Tensor:
        Counting.count += 1000
        return (embedding - means).abs().pow(3).sum(1)

    def brighter(x: Tensor, generator: torch.Generator, siamese: bool) -> Tensor:
        Counting.count += 10**6
        return x + 1

    for kept in (DATA.labels >= 0, DATA.labels == 1, DATA.labels > 5):
        Counting.count = 0
        fixed = FixedNetwork(Counting())
        image_sgd(DATA[kept], size=10, sigma=1.0, networks=fixed, steps=2, ipc=1, loss=cubed, rate=0.7)
        class_sums(*DATA[kept], PublicEmbedders(fixed, 2, like=DATA), num_classes=3)
        counts.add(Counting.count)
        Counting.count = 0
        networks = EmbeddingNetworks(sampler := FixedNetwork(Counting()), augment=brighter, chunk=2)
        image_sgd(DATA[kept], size=10, sigma=1.0, networks=networks, steps=2, ipc=1, loss=cubed, rate=0.7)
        class_sums(*DATA[kept], PublicEmbedders(sampler, 2, like=DATA, augment=brighter), num_classes=3, chunk=2)
        augmented.add(Counting.count)
    assert len(counts) == len(augmented) == 1


def test_layer_that_works_in_place_leaves_the_set_as_it_is() -> None:
    data = LabeledImages(torch.randn(6, 1, 4, 4, generator=derive(4)), torch.arange(6) % 3, num_classes=3)
    before = data.images.clone()
    network = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 3))
    class_sums(*data, PublicEmbedders(FixedNetwork(network), 1, like=data), num_classes=3)
    assert torch.equal(data.images, before)


def test_contents_are_compared_inside_of_entry_points_only() -> None:
    def compared() -> bool:
        return active_records().content

    whole, memory = apart_from_records(), apart_from_records(content=False)
    assert [compared(), whole(compared)(), memory(compared)(), compared()] == [False, True, False, False]
    assert whole(memory(compared))()  # the outer entry point decides
    declare = whole(lambda: [declare_records(one) or len(active_records().tensors) for one in (PIXELS, OTHER.images)])
    assert declare() == [1, 2]
