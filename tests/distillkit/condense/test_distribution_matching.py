from __future__ import annotations

import importlib
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit import LabeledImages, Normalization
from distillkit.augment import DSA, CropFlip
from distillkit.condense import Progress, distance_to_means, distribution_matching, embedding_means, gradient_matching
from distillkit.condense._class_embeddings import _class_groups
from distillkit.condense._parallel import ParallelMap, class_threads
from distillkit.condense._state import load_state, save_state
from distillkit.condense.initialization import initial_images
from distillkit.networks import ConvNet, FixedNetwork, NetworkBall, RandomNetworks, build
from distillkit.normalization import IDENTITY
from distillkit.rng import derive
from distillkit.sets import TiledImages, Tiles
from tests.refused import refused

SHAPE, CLASSES = (2, 8, 8), 4


def convnet(norm: str = "instance") -> nn.Module:
    return ConvNet(SHAPE, CLASSES, width=8, depth=2, norm=norm)


def frozen_net(dtype: torch.dtype = torch.float32, norm: str = "instance", train: bool = False) -> Any:
    return build(lambda: convnet(norm), 1).to(dtype).requires_grad_(False).train(train)


def data(counts: tuple[int, ...] = (9, 5, 0, 7), dtype: torch.dtype = torch.float32, seed: int = 0) -> LabeledImages:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=derive(seed, "order"))]
    images = torch.randn(len(labels), *SHAPE, generator=derive(seed), dtype=dtype) + labels.view(-1, 1, 1, 1)
    names = [f"class {c}" for c in range(len(counts))]
    return LabeledImages(images, labels, normalization=Normalization((0.1, 0.2), (0.2, 0.4)), class_names=names)


REAL = data(dtype=torch.float64)


@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("match", ["embedding", "embedding+logits"])
@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_gradient_equals_the_equation_in_one_graph(
    norm: str, match: str, chunk: int | None, dtype: torch.dtype, rounding: float
) -> None:
    real_counts, counts, network = [9, 5, 7], [2, 1, 6], frozen_net(dtype, norm, train=norm == "batch")
    real = torch.randn(21, *SHAPE, generator=derive(0), dtype=dtype) + 1
    synthetic = torch.randn(9, *SHAPE, generator=derive(1), dtype=dtype)

    def means(images: Tensor, sizes: list[int]) -> Tensor:
        outputs = [network.features(images), network(images)][: 1 + ("logits" in match)]
        return torch.stack([own.mean(0) for own in torch.cat(outputs, 1).split(sizes)])

    targets = embedding_means(network, real, real_counts, match=match, chunk=chunk)
    torch.testing.assert_close(targets, means(real, real_counts), rtol=1e-4, atol=1e-5)
    for factor in (0, 1):
        augment = (lambda x, k: x * (k + 2)) if factor else None
        loss, gradient = distance_to_means(
            network, targets, synthetic, counts, match=match, augment=augment, chunk=chunk
        )
        leaf = synthetic.clone().requires_grad_()
        scaled = torch.cat([x * (k + 2) ** factor for k, x in enumerate(leaf.split(counts))])
        wanted = (means(real, real_counts) - means(scaled, counts)).square().sum()
        (slow,) = torch.autograd.grad(wanted, leaf)
        assert float(loss) == pytest.approx(float(wanted), rel=rounding)
        assert (gradient - slow).norm() <= rounding * slow.norm()


class Flat(nn.Module):
    """A user's network without the split; it flattens with `view`, which fails on channels_last maps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, stride=2), nn.Linear(36, CLASSES + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x))
        return self.head(x.view(x.shape[0], -1))


class Frozen(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def mmd(real: Tensor, synthetic: Tensor) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (-(a[:, None] - b).square().mean(2)).exp().mean()

    return kernel(real, real) + kernel(synthetic, synthetic) - 2 * kernel(real, synthetic)


def first(real: Tensor, synthetic: Tensor) -> Tensor:
    return (real[0] - synthetic[-1]).square().sum()


def double(make: Callable[..., nn.Module], *options: Any) -> Callable[[], nn.Module]:
    return lambda: make(*options).double()


def untracked() -> nn.Module:
    net = frozen_net(torch.float64, "batch")
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean = norm.running_var = None
    return net


OPTIONS: dict[str, dict[str, Any]] = {
    "DM": {"networks": lambda: RandomNetworks(double(convnet)), "augment": DSA()},
    "FedLGD": {"networks": lambda: FixedNetwork(frozen_net(torch.float64)), "augment": DSA(), "chunk": 3},
    "FedDM": {"networks": lambda: NetworkBall(frozen_net(torch.float64), 5.0), "match": "embedding+logits",
              "batch_real": None, "chunk": 1},
    "cached": {"networks": lambda: FixedNetwork(frozen_net(torch.float64)), "match": "embedding+logits", "chunk": 3},
    "cached in one group": {"networks": lambda: FixedNetwork(frozen_net(torch.float64)), "classes": [3, 0]},
    "not cached": {"networks": lambda: FixedNetwork(frozen_net(torch.float64), cache=False), "lr": None, "chunk": 6},
    "batch norm": {"networks": lambda: RandomNetworks(double(convnet, "batch")), "chunk": 1, "momentum": 0.9, "ipc": 1},
    "untracked": {"networks": lambda: FixedNetwork(untracked()), "match": mmd, "batch_real": 5, "chunk": 2},
    "untracked means": {"networks": lambda: FixedNetwork(untracked()), "chunk": 2},
    "own loss": {"networks": lambda: RandomNetworks(double(Flat)), "match": mmd, "augment": DSA("flip"), "chunk": 2},
    "order": {"networks": lambda: FixedNetwork(frozen_net(torch.float64)), "match": first, "batch_real": 7, "lr": None},
    "tiles": {"networks": lambda: RandomNetworks(double(Flat)), "parametrize": Tiles(2), "lr": None, "init": "noise"},
    "real tiles": {"networks": lambda: NetworkBall(frozen_net(torch.float64), 1.0), "parametrize": Tiles(2),
                   "augment": DSA("flip_crop"), "chunk": 5, "ipc": 1},
    "given": {"networks": lambda: RandomNetworks(double(convnet)), "init": data((2, 0, 0, 1), torch.float64, 5)},
    "given classes": {"networks": lambda: RandomNetworks(double(Flat)), "classes": [1], "init": data((1, 2, 0, 1))},
    "classes": {"networks": lambda: RandomNetworks(double(Flat)), "classes": [3, 0], "init": "statistics"},
}  # fmt: skip


def run(name: str, real: LabeledImages = REAL, **changes: Any) -> LabeledImages:
    given = {"ipc": 2, "steps": 4, "batch_real": 4, "lr": 0.1, "progress": False, **OPTIONS[name], **changes}
    return distribution_matching(real, **{**given, "networks": given["networks"]()})


def slow_dm(start: LabeledImages, seed: int, **options: Any) -> tuple[Tensor, list[float], float]:
    """Run the method with torch's SGD in one graph. Return the (stored) images, the losses and the learning rate."""
    given = {"networks": None, "batch_real": 4, "lr": 0.1, "momentum": 0.5, "match": "embedding", "augment": None}
    networks, batch, lr, momentum, match, augment = ((given | options)[name] for name in given)
    tiles, networks = options.get("parametrize"), networks()
    norms = [m for m in networks.draw(derive(0)).modules() if isinstance(m, nn.BatchNorm2d)]
    if networks.fixed and augment is None and not callable(match) and not norms:
        batch = None

    def loss_of(stored: Tensor, step: int) -> Tensor:
        network, parts = networks.draw(derive(seed, step, "network")), ([], [])
        synthetic = stored if tiles is None else tiles.decode(stored)
        for c in start.labels.unique().tolist():
            rows = (REAL.labels == c).nonzero().flatten()
            if batch is not None and len(rows) > batch:
                rows = rows[torch.randperm(len(rows), generator=derive(seed, step, c, "real"))[:batch]]
            for into, x in zip(parts, (REAL.images[rows], synthetic[start.labels == c])):
                into.append(x if augment is None else augment(x, derive(seed, step, c, "augment"), siamese=True))
        outputs = []
        for images in parts:
            x = network.features(torch.cat(images))
            x = torch.cat([x, network.classifier(x)], 1) if match == "embedding+logits" else x
            outputs.append(x.split([len(own) for own in images]))
        mean = lambda r, s: (r.mean(0) - s.mean(0)).square().sum()  # noqa: E731
        losses = [(match if callable(match) else mean)(r, s) for r, s in zip(*outputs, strict=True)]
        return torch.stack(losses).sum()

    stored = (start.stored if isinstance(start, TiledImages) else start.images).clone().requires_grad_()
    if lr is None:
        noise = torch.randn(stored.shape, generator=derive(seed, "lr"), dtype=stored.dtype).requires_grad_()
        size = torch.autograd.grad(loss_of(noise, 0), noise)[0].square().mean().sqrt()
        lr = float(f"{0.05 / 0.3 / float(size):.3g}")
    optimizer, losses = torch.optim.SGD([stored], lr=lr, momentum=momentum), []
    for step in range(4):
        optimizer.zero_grad()
        losses.append(loss := loss_of(stored, step))
        loss.backward()
        optimizer.step()
    return stored.detach(), [float(loss) for loss in losses], lr


@pytest.mark.usefixtures("global_rng_untouched")
@pytest.mark.parametrize("name", OPTIONS)
def test_result_equals_sgd_on_the_equation_and_a_resumed_run_to_the_bit(name: str, tmp_path: Path) -> None:
    """Unequal classes, of which one is absent, in colour with unequal deviations."""
    seen: list[tuple[int, int, float]] = []
    generator, options = torch.Generator().manual_seed(3), {"ipc": 2, "init": "real", **OPTIONS[name]}
    seed = int(torch.randint(2**62, (), generator=(other := generator.clone_state())))

    def save(progress: Progress) -> None:
        seen.append((progress.step, progress.steps, progress.loss))
        if progress.step == 2:
            save_state(tmp_path / "state", progress.state())

    made = run(name, callback=save, generator=generator)
    assert torch.equal(generator.get_state(), other.get_state())  # one draw
    how = {key: options[key] for key in ("init", "classes", "parametrize") if key in options}
    start = initial_images(REAL, options["ipc"], generator=derive(seed, "init"), **how)
    stored, losses, lr = slow_dm(start, seed, **OPTIONS[name])
    images = made.stored if isinstance(made, TiledImages) else made.images
    assert not torch.equal(images, start.stored if isinstance(start, TiledImages) else start.images)
    torch.testing.assert_close(images, stored, rtol=1e-6, atol=1e-9)
    assert [(step, 4, pytest.approx(loss)) for step, loss in enumerate(losses, 1)] == seen
    assert torch.equal(made.labels, start.labels)
    assert (made.normalization, made.class_names) == (REAL.normalization, REAL.class_names)
    names = {"networks": repr(options["networks"]()), "augment": options.get("augment") and repr(options["augment"])}
    match, ipc = options.get("match", "embedding"), {"given": [2, 1]}.get(name, options["ipc"])
    facts = {**names, "method": "distribution matching", "seed": seed, "steps": 4, "lr": pytest.approx(lr), "ipc": ipc,
             "momentum": options.get("momentum", 0.5), "loss": seen[-1][2], "absent": [2],
             "batch_real": options.get("batch_real", 4) or len(REAL), "init": start.info["init"],
             "match": match if isinstance(match, str) else f"{__name__}.{match.__name__}"}  # fmt: skip
    assert {key: made.info[key] for key in facts} == facts
    if tiles := options.get("parametrize"):
        assert torch.equal(made.images, tiles.decode(images))
        assert made.info["parametrize"] == repr(tiles)
    kept = load_state(tmp_path / "state")
    for resume in (tmp_path / "state", kept):
        with torch.no_grad():  # has no effect on the call
            again = run(name, resume=resume, generator=99)
        assert torch.equal(again.images, made.images)
        assert again.info == made.info | {"generator": 99}
    assert all(torch.equal(kept[key], value) for key, value in load_state(tmp_path / "state").items())
    if options.get("lr", 0) is None:
        assert torch.equal(
            run(name, lr=made.info["lr"], generator=torch.Generator().manual_seed(3)).images, made.images
        )
        refused(lambda: run(name, resume=resume, lr=1.0), ValueError, r"lr=None \(now 1\.0\)")


def unchanged(images: Tensor, generator: torch.Generator, *, siamese: bool = False) -> Tensor:
    return images


def moved() -> Any:
    net = frozen_net(torch.float64)
    net.classifier.bias.data[0] += 0.01
    return FixedNetwork(net)


@pytest.mark.parametrize(("name", "changes", "words"), [
    ("DM", {"lr": 0.2}, r"lr=0\.1 \(now 0\.2\)$"),
    ("DM", {"momentum": 0.1}, r"momentum=0\.5 \(now 0\.1\)$"),
    ("DM", {"batch_real": 5}, r"batch_real=4 \(now 5\)$"),
    ("DM", {"match": "embedding+logits"}, r"match='embedding' \(now 'embedding\+logits'\)$"),
    ("DM", {"augment": DSA("flip")}, r"augment=.* \(now .*'flip'.*$"),
    ("DM", {"augment": unchanged}, rf"augment=.* \(now '{__name__}\.unchanged'\)$"),
    ("DM", {"ipc": 1}, r"classes=\{'0': \[9, 2\], .*now \{'0': \[9, 1\], .*shape=\[6, 2, 8, 8\] \(now \[3,"),
    ("DM", {"classes": [0, 1]}, "classes=.*shape="),
    ("DM", {"parametrize": Tiles(2)}, r"classes=.*parametrize=None \(now 'Tiles\(factor=2\)'\)$"),
    ("DM", {"networks": lambda: FixedNetwork(frozen_net(torch.float64))}, "network=.*networks='RandomNetworks'"),
    ("DM", {"networks": lambda: RandomNetworks(double(convnet, "batch"))}, "arguments: network=[^=]*$"),
    ("cached", {"networks": moved}, "arguments: network=.*outputs"),
    ("cached", {"networks": OPTIONS["not cached"]["networks"]}, r"cache=True \(now False\)$"),
    ("tiles", {"parametrize": Tiles(4)}, r"parametrize='Tiles\(factor=2\)' \(now 'Tiles\(factor=4\)'\)"),
    ("own loss", {"match": first}, r"match='.*\.mmd' \(now '.*\.first'\)$"),
    ("DM", {"real": REAL.replace(images=REAL.images.flip(3))}, r"arguments: data='\w+' \(now '\w+'\)$"),
    ("DM", {"real": REAL.to(dtype=torch.float32)}, r"dtype='torch.float64' \(now 'torch.float32'\)$"),
])  # fmt: skip
def test_state_of_another_call_is_refused_by_name(name: str, changes: dict[str, Any], words: str) -> None:
    states: list[Any] = []
    done = run(name, callback=lambda progress: states.append(progress.state()), steps=2)
    refused(lambda: run(name, resume=states[-1], **changes), ValueError, words)
    again = run(name, resume=states[-1], steps=2)
    assert torch.equal(again.images, done.images)
    assert again.info == done.info
    if "networks" in changes:
        with pytest.raises(ValueError, match="method='distribution matching' .now 'gradient matching'"):
            gradient_matching(REAL, networks=RandomNetworks(double(convnet)), ipc=2, resume=states[0])


def test_callback_that_saves_no_state_costs_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distillkit.condense._condensation.call_identity", None)
    run("DM", callback=lambda progress: progress.images.sum())


class Overlap(nn.Module):
    """Network that refuses a pass while it is in use, so each thread must have a copy."""

    used = False

    def __init__(self) -> None:
        super().__init__()
        self.net, self.classifier = convnet(), nn.Linear(32, CLASSES)

    def features(self, images: Tensor) -> Tensor:
        assert not self.used
        self.used = True
        time.sleep(1e-3)
        found, self.used = self.net.features(images), False
        return found


class Plain(nn.Module):
    """Network without the split, which `split` hooks during a call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = convnet()

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


def uncopied(attribute: object, kind: Callable[[], nn.Module] = Overlap) -> Callable[[], nn.Module]:
    """Return a factory of networks with an attribute that cannot be copied."""

    def make() -> nn.Module:
        network = kind()
        network.attribute = attribute
        return network

    return make


@pytest.fixture
def intra_op_threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("augment", [None, DSA()])
@pytest.mark.parametrize(
    "make", [convnet, Overlap, Plain, uncopied(threading.Lock()), uncopied(torch.ones(1).requires_grad_() * 2)]
)
@pytest.mark.usefixtures("global_rng_untouched")
def test_classes_in_parallel_are_bitwise_equal(
    make: Any, augment: DSA | None, intra_op_threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each class has one intra-op thread for any total number, and networks drawn in place are copied."""
    names: set[str] = set()
    there = embedding_means

    def watched(*args: Any, **options: Any) -> Tensor:
        names.add(threading.current_thread().name.split("_")[0])
        assert torch.get_num_threads() == 1
        return there(*args, **options)

    module = importlib.import_module("distillkit.condense.distribution_matching")
    monkeypatch.setattr(module, "embedding_means", watched)
    made = []
    for threads in (1, 2, 3):
        intra_op_threads(threads)
        options: dict[str, Any] = {"ipc": 2, "steps": 3, "batch_real": 5, "chunk": 2, "augment": augment}
        made.append(distribution_matching(data(), networks=RandomNetworks(make), **options))
        assert torch.get_num_threads() == threads
    assert names == {"MainThread", "class"}
    assert all(torch.equal(one.images, made[0].images) and one.info == made[0].info for one in made)


@pytest.mark.parametrize(
    "match", ["embedding", "embedding+logits", lambda real, own: (real.mean() - own.mean()).square()]
)
def test_autocast_holds_for_any_number_of_threads(match: Any, intra_op_threads: Any) -> None:
    made = []
    for threads, cast in ((1, True), (2, True), (2, False)):
        intra_op_threads(threads)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            networks = RandomNetworks(convnet)
            made.append(distribution_matching(data(), networks=networks, ipc=1, steps=1, chunk=2, match=match).images)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert torch.allclose(made[0], made[2], atol=0.2)


def test_error_in_one_class_is_raised_by_the_call(intra_op_threads: Any) -> None:
    class Once(Overlap):
        def features(self, images: Tensor) -> Tensor:
            if len(images) == 4:
                raise ArithmeticError("of four")
            return super().features(images)

    intra_op_threads(2)
    for make in (Once, uncopied(threading.Lock(), Once)):
        with pytest.raises(ArithmeticError, match="of four"):
            distribution_matching(data((4, 4, 4)), networks=RandomNetworks(make), ipc=2, steps=1, chunk=4)


class Counting:
    """Fixed sampler that counts the images which pass through its network."""

    fixed = True

    def __init__(self, network: Any) -> None:
        self.network, self.seen = network, []
        self.classifier = network.classifier

    def features(self, images: Tensor) -> Tensor:
        self.seen.append(len(images))
        return self.network.features(images)

    def draw(self, generator: torch.Generator) -> Any:
        return self


def test_fixed_network_embeds_real_images_once_and_no_pass_exceeds_a_chunk() -> None:
    for fixed, options, real in (
        (True, {}, 21),
        (False, {"batch_real": None}, 4 * 21),
        (True, {"augment": DSA()}, 4 * 12),
        (True, {"match": mmd}, 4 * 12),
    ):
        (counting := Counting(frozen_net())).fixed = fixed
        how: dict[str, Any] = {"ipc": 3, "steps": 4, "batch_real": 4, "chunk": 2, **options}
        distribution_matching(data(), networks=counting, **how)
        assert sum(counting.seen) == 2 + real + 4 * 9  # two images of noise try the network
        assert max(counting.seen) == 2


def test_zero_steps_return_the_initial_set_and_leave_inputs_unchanged() -> None:
    real, start = data(), data((1, 1, 0, 1), seed=4)
    before, begun = real.images.clone(), start.images.clone()
    made = distribution_matching(real, networks=RandomNetworks(convnet), init=start, steps=0)
    assert [made.info[name] for name in ("lr", "momentum", "batch_real")] == [1.0, 0.5, 256]  # DM's defaults
    assert torch.equal(made.images, start.images[start.labels.argsort()])
    assert made.info["loss"] is None
    assert run("tiles", steps=0).info["lr"] is None
    every = distribution_matching(real, networks=RandomNetworks(convnet), steps=0, batch_real=None)
    assert every.info["batch_real"] == len(real)
    distribution_matching(real, networks=RandomNetworks(convnet), init=start, steps=2, lr=0.1)
    assert torch.equal(real.images, before)
    assert torch.equal(start.images, begun)


@pytest.mark.parametrize(("threads", "parts", "autocast", "others"), [
    (1, 3, False, False), (2, 1, False, False), (2, 3, True, False), (2, 2, False, True), (3, 5, False, True),
])  # fmt: skip
def test_groups_run_in_other_threads_only_if_that_helps(
    threads: int, parts: int, autocast: bool, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are in order; parts that run at once have their own networks, and at most `threads` of them exist."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    network = convnet()
    with class_threads(torch.zeros(1, device="meta")) as pool:
        assert pool is None
    with torch.autocast("cpu", enabled=autocast), class_threads(torch.zeros(1)) as pool:
        made = ParallelMap(network, pool)(lambda own, part: (part, own, threading.get_ident()), range(parts))
    assert [part for part, *_ in made] == list(range(parts))
    assert {ident != threading.get_ident() for *_, ident in made} == {others}
    assert len({id(own) for _, own, _ in made}) <= min(threads, parts)
    assert others or all(own is network for _, own, _ in made)
    groups = [*_class_groups(network, torch.zeros(0, *SHAPE), [1, 4, 2, 9, 1, 3, 1], 5)]
    assert [(one.start, one.stop) for one in groups] == [(0, 2), (2, 3), (3, 4), (4, 7)]


@pytest.mark.parametrize(("changes", "message"), [
    ({"momentum": 1.0}, "momentum must be less than 1"),
    ({"momentum": -0.1}, "momentum must be at least 0"),
    ({"lr": 0.0}, "lr must be greater than 0"),
    ({"batch_real": 0}, "batch_real must be at least 1"),
    ({"augment": CropFlip(IDENTITY)}, "^augment pads with black for"),
    ({"networks": lambda: RandomNetworks(convnet)}, "networks must have the dtype and device of the images"),
    ({"real": REAL[:0]}, "at least one image, got an empty set"),
    ({"match": "means", "steps": 0}, "match must be one of"),
    ({"match": "embedding+logits", "networks": lambda: RandomNetworks(double(Flat))}, "networks must return 4 logits"),
    ({"networks": lambda: RandomNetworks(lambda: Frozen().double())}, "^networks must be .* to their images, but its"),
    ({"match": lambda real, synthetic: 1.0}, r"match must return a real scalar tensor .* got 1\.0$"),
    ({"match": lambda real, synthetic: synthetic.mean().view(1)}, r"got a torch.float64 tensor of shape \[1\]$"),
    ({"match": lambda real, synthetic: real.sum()}, r"tensor of shape \[\] without a gradient$"),
    ({"match": lambda real, synthetic: (synthetic.mean() * 1j).exp()}, "got a torch.complex128 tensor"),
    ({"match": lambda real, synthetic: real.add_(1).mean() + synthetic.mean()}, "must not change its arguments"),
    ({"match": lambda real, synthetic: (synthetic.sum(), synthetic.detach().sub_(1))[0]}, "must not change its argum"),
    ({"match": lambda real, synthetic: (real - synthetic[:, 1:]).mean()},
     r"match fails on real and synthetic embeddings of shapes \[4, 32\] and \[2, 32\]: RuntimeError: The size"),
    ({"match": lambda real, synthetic: real.average()}, r"of shapes \[4, 32\] and \[2, 32\]: AttributeError: 'Tensor'"),
    ({"match": lambda real, synthetic, third: real.mean()}, r"match is called as match\(real, synthetic\)"),
    ({"match": lambda real, synthetic: 0 * synthetic.sum(), "lr": None}, r"gradient at noise images has size 0\.0"),
    ({"match": lambda real, synthetic: 1e200 * synthetic.sum(), "lr": None}, "noise images has size inf; try lr"),
])  # fmt: skip
def test_invalid_options_are_named(changes: dict[str, Any], message: str) -> None:
    refused(lambda: run("DM", **changes), (TypeError, ValueError), message)


def test_invalid_counts_and_targets_are_named() -> None:
    network, images = frozen_net(), torch.zeros(9, *SHAPE)
    for counts, words in (
        ([4, 0, 5], "at least 1, got 0"), ([4, 4], r"to the number of images, 9, got \[4, 4\]"), ([], r"9, got \[\]"),
        ([8, 2], r"9, got \[8, 2\]"),
    ):  # fmt: skip
        for call in (embedding_means, lambda n, x, c: distance_to_means(n, torch.zeros(len(c), 4), x, c)):
            refused(lambda c=counts, f=call: f(network, images, c), ValueError, f"^counts must .*{words}$")
    refused(lambda: embedding_means(network, images[:0], []), ValueError, r"^counts must .* images, 0, got \[\]$")
    for targets, came in (
        (torch.zeros(2, 32), r"torch.float32 \[2, 32\]"), (torch.zeros(3), r"torch.float32 \[3\]"),
        (torch.zeros(3, 32, 1), r"torch.float32 \[3, 32, 1\]"),
        (torch.zeros(3, 32).double(), r"torch.float64 \[3, 32\]"), ([[0.0]] * 3, "list"),
    ):  # fmt: skip
        words = rf"^targets must be torch.float32 \[3, d\], a mean for each of the counts, got {came}$"
        refused(lambda t=targets: distance_to_means(network, t, images, [4, 1, 4]), ValueError, words)
    empty = torch.zeros(3, 32, device="meta")
    refused(lambda: distance_to_means(network, empty, images, [4, 1, 4]), ValueError, "^targets must have values")
    refused(lambda: embedding_means(network, images.to("meta"), [9]), ValueError, "^images must have values")
    assert embedding_means(network, images * torch.nan, [9]).isnan().all()  # without a look at all pixels
    for match in ("logits", ""):
        refused(lambda m=match: embedding_means(network, images, [9], match=m), ValueError, "^match must be one of")
    for wrong, came in ((ConvNet, "type"), (nn.Flatten(), "Flatten")):
        words = rf"network must have features and classifier \(networks\.split\), got {came}$"
        refused(lambda n=wrong: embedding_means(n, images, [9]), TypeError, words)


def test_losses_and_images_that_are_not_finite_stop() -> None:
    for value in (torch.nan, torch.inf):
        with pytest.raises(FloatingPointError, match=f"the loss is -?{value} in step 1: matching diverged; lower lr"):
            run("DM", match=lambda real, synthetic, x=value: synthetic.sum().abs() * x)
    wide: dict[str, Any] = {"real": data(), "networks": lambda: RandomNetworks(convnet), "lr": 1e37}
    with pytest.raises(FloatingPointError, match="NaN or Inf in the optimized images: .* lower lr, or the lr of inner"):
        run("DM", match=lambda real, synthetic: 1e6 * synthetic.sum(), steps=1, **wide)


@pytest.mark.parametrize(("lr", "std", "edge", "steps", "far"), [
    (1e-3, 1.0, 0.0, 25, False), (1234.0, 1.0, 0.0, 25, True), (1.0, 1.0, 0.0, 3, True), (10.0, 0.01, 0.0, 25, False),
    *((1e-9, 0.01, edge, 1, far) for edge, far in ((-5.1, True), (-4.9, False), (5.9, False), (6.1, True))),
])  # fmt: skip
@pytest.mark.parametrize("sign", [-1, 1])
def test_pixels_far_outside_their_range_are_named_once(
    lr: float, std: float, edge: float, steps: int, sign: int, *, far: bool
) -> None:
    flat = lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 4)).double()  # noqa: E731
    real = REAL.replace(images=REAL.images.clone(), normalization=Normalization((0.0,), (std,)))
    real.images[:, 0, 0, 0] = edge / std
    ranges: list[Any] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        match = lambda real, synthetic: sign * synthetic.sum()  # noqa: E731
        run(
            "DM", match=match, steps=steps, lr=lr, real=real, networks=lambda: RandomNetworks(flat), augment=None,
            callback=lambda progress: ranges.append(progress.images.aminmax()),
        )  # fmt: skip
    low, high = (std * float(bound) for bound in ranges[min(10, steps) - 1])
    words = f"distribution matching: after step {min(10, steps)}, pixels range from {low:.3g} to {high:.3g}, far "
    words += f"outside [0, 1]; the result is unlikely to be useful. Lower lr={lr:g}"
    assert [str(w.message) for w in said if "pixels range" in str(w.message)] == [words] * far
