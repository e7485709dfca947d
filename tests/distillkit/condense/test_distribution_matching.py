from __future__ import annotations

import importlib
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillkit import LabeledImages, Normalization
from distillkit.augment import DSA
from distillkit.condense import (
    InnerTraining,
    distance_to_means,
    distribution_matching,
    embedding_means,
    gradient_matching,
    load_state,
    save_state,
)
from distillkit.condense._parallel import ParallelMap, class_threads
from distillkit.networks import ConvNet, FixedNetwork, Network, NetworkBall, RandomNetworks, build, split
from distillkit.rng import as_generator, derive

SHAPE, CLASSES = (2, 8, 8), 3


def convnet(norm: str = "instance") -> nn.Module:
    return ConvNet(SHAPE, CLASSES, width=8, depth=2, norm=norm)


def frozen_net(dtype: torch.dtype = torch.float32, norm: str = "instance", train: bool = False) -> Any:
    return build(lambda: convnet(norm), 1).to(dtype).requires_grad_(False).train(train)


def data(counts: tuple[int, ...] = (9, 5, 7), dtype: torch.dtype = torch.float32, seed: int = 0) -> LabeledImages:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=derive(seed, "order"))]
    images = torch.randn(len(labels), *SHAPE, generator=derive(seed), dtype=dtype) + labels.view(-1, 1, 1, 1)
    return LabeledImages(images, labels, num_classes=len(counts))


def reference(network: Any, real: list[Tensor], synthetic: list[Tensor], match: str, together: bool) -> Any:
    """Compute the equation in one graph over all classes, image by image unless statistics are shared."""

    def run(images: Tensor) -> Tensor:
        embedding = network.features(images)
        return embedding if match == "embedding" else torch.cat([embedding, network(images)], 1)

    leaves = [own.clone().requires_grad_() for own in synthetic]
    if together:
        reals = run(torch.cat(real)).split([len(own) for own in real])
        fakes = run(torch.cat(leaves)).split([len(own) for own in leaves])
    else:
        reals = [torch.cat([run(image[None]) for image in own]) for own in real]
        fakes = [torch.cat([run(image[None]) for image in own]) for own in leaves]
    loss = sum(((r.mean(0) - f.mean(0)) ** 2).sum() for r, f in zip(reals, fakes, strict=True))
    loss.backward()
    return loss.detach(), torch.cat([leaf.grad for leaf in leaves])


@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("match", ["embedding", "embedding+logits"])
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_gradient_equals_the_slow_reference(norm: str, match: str, chunk: int | None) -> None:
    real_counts, counts = [9, 5, 7], [2, 1, 6]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        network = frozen_net(dtype, norm, train=norm == "batch")
        real = torch.randn(21, *SHAPE, generator=derive(0), dtype=dtype) + 1
        synthetic = torch.randn(9, *SHAPE, generator=derive(1), dtype=dtype)
        targets = embedding_means(network, real, real_counts, match=match, chunk=chunk)
        loss, gradient = distance_to_means(network, targets, synthetic, counts, match=match, chunk=chunk)
        slow_loss, slow = reference(
            network, list(real.split(real_counts)), list(synthetic.split(counts)), match, norm == "batch"
        )
        assert float(loss) == pytest.approx(float(slow_loss), rel=tolerance)
        assert (gradient - slow).norm() <= tolerance * slow.norm()
        if norm == "instance":
            scaled = [x * (k + 2) for k, x in enumerate(synthetic.split(counts))]
            options: dict[str, Any] = {"match": match, "augment": lambda x, k: x * (k + 2), "chunk": chunk}
            loss, gradient = distance_to_means(network, targets, synthetic, counts, **options)
            slow_loss, slow = reference(network, list(real.split(real_counts)), scaled, match, False)
            slow = torch.cat([g * (k + 2) for k, g in enumerate(slow.split(counts))])
            assert float(loss) == pytest.approx(float(slow_loss), rel=tolerance)
            assert (gradient - slow).norm() <= tolerance * slow.norm()


def test_batch_statistics_are_those_of_mixed_classes() -> None:
    network = frozen_net(norm="batch", train=True)
    own = torch.randn(5, *SHAPE, generator=derive(0))
    mixed = embedding_means(network, torch.cat([own, 3 * own]), [5, 5], chunk=1)
    alone = [embedding_means(network, images, [5])[0] for images in (own, 3 * own)]
    assert torch.allclose(alone[0], alone[1], atol=1e-3)
    assert (mixed[0] - mixed[1]).norm() > 0.3 * mixed[0].norm()


def test_steps_are_sgd_with_momentum_on_the_pixels() -> None:
    real, start = data(dtype=torch.float64), data((2, 1, 2), torch.float64, seed=5)
    networks = NetworkBall(frozen_net(torch.float64), 0.5)
    drawn: list[torch.Generator] = []

    class Spy:
        fixed = False

        def draw(self, generator: torch.Generator) -> Any:
            drawn.append(generator.clone_state())
            return networks.draw(generator)

    made = distribution_matching(real, networks=Spy(), init=start, steps=3, lr=0.3, momentum=0.5, batch_real=None)
    by_class = [real.images[real.labels == c] for c in range(CLASSES)]
    expected = torch.cat([start.images[start.labels == c] for c in range(CLASSES)])
    velocity = torch.zeros_like(expected)
    for generator in drawn:
        parts = list(expected.split([2, 1, 2]))
        velocity = 0.5 * velocity + reference(networks.draw(generator), by_class, parts, "embedding", False)[1]
        expected = expected - 0.3 * velocity
    assert len(drawn) == 3
    assert torch.allclose(made.images, expected, rtol=0, atol=1e-12)
    assert made.labels.tolist() == [0, 0, 1, 2, 2]


def test_matching_lowers_the_loss_and_returns_a_set_with_its_space() -> None:
    real = data().replace(normalization=Normalization((0.1, 0.2), (0.5, 0.5)))
    losses: list[float] = []
    made = distribution_matching(
        real, networks=FixedNetwork(frozen_net()), ipc=2, steps=30, init="noise", lr=0.3,
        callback=lambda progress: losses.append(progress.loss),
    )  # fmt: skip
    assert losses[-1] < 0.2 * losses[0]
    assert made.normalization == real.normalization
    assert made.num_classes == CLASSES
    assert made.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert made.info["networks"] == "FixedNetwork(ConvNet)"
    assert made.info["loss"] == losses[-1]
    assert made.info["init"] == "noise"


OPTIONS: dict[str, dict[str, Any]] = {
    "DM": {"networks": lambda: RandomNetworks(convnet), "augment": DSA()},
    "FedLGD": {"networks": lambda: FixedNetwork(frozen_net()), "augment": DSA()},
    "cached": {"networks": lambda: FixedNetwork(frozen_net())},
    "FedDM": {"networks": lambda: NetworkBall(frozen_net(), 5.0), "match": "embedding+logits"},
    "batch norm": {"networks": lambda: RandomNetworks(lambda: convnet("batch"))},
}


def run(name: str, **changes: Any) -> LabeledImages:
    options = {**OPTIONS[name], "ipc": 2, "steps": 5, "batch_real": 4, "lr": 0.1, **changes}
    options["networks"] = options["networks"]()
    return distribution_matching(data(), **options)


@pytest.mark.usefixtures("global_rng_untouched")
@pytest.mark.parametrize("name", OPTIONS)
def test_run_resumed_from_its_file_is_bitwise_equal(name: str, tmp_path: Any) -> None:
    def save(progress: Any) -> None:
        if progress.step == 3:
            save_state(tmp_path / "state", progress.state())

    whole = run(name, callback=save)
    assert torch.equal(run(name).images, whole.images)
    assert not torch.equal(run(name, generator=1).images, whole.images)
    resumed = run(name, resume=tmp_path / "state")
    assert torch.equal(resumed.images, whole.images)
    assert torch.equal(run(name, resume=load_state(tmp_path / "state"), generator=99).images, whole.images)
    assert resumed.info == whole.info
    augment, seed = OPTIONS[name].get("augment"), int(torch.randint(2**62, (), generator=as_generator(0)))
    facts = {"method": "distribution matching", "augment": augment and repr(augment), "seed": seed, "generator": 0,
             "steps": 5, "batch_real": 4, "match": OPTIONS[name].get("match", "embedding")}  # fmt: skip
    assert {key: whole.info[key] for key in facts} == facts
    longer = run(name, resume=tmp_path / "state", steps=7)
    assert torch.equal(longer.images, run(name, steps=7).images)


def test_state_of_another_call_is_refused_by_name() -> None:
    states: list[Any] = []
    run("DM", callback=lambda progress: states.append(progress.state()))
    with pytest.raises(ValueError, match=r"lr=0\.1 \(now 0\.2\)"):
        run("DM", resume=states[0], lr=0.2)
    with pytest.raises(ValueError, match=r"classes=.*networks='RandomNetworks'"):
        run("FedDM", resume=states[0], ipc=1)
    with pytest.raises(ValueError, match="already done 5 steps, but steps=4"):
        run("DM", resume=states[-1], steps=4)
    for name, changes, words in (
        ("DM", {"momentum": 0.1}, r"momentum=0\.5 \(now 0\.1\)"),
        ("DM", {"batch_real": 5}, r"batch_real=4 \(now 5\)"),
        ("cached", {"networks": lambda: FixedNetwork(frozen_net(), cache=False)}, r"cache=True \(now False\)"),
    ):
        run(name, callback=lambda progress: states.append(progress.state()), steps=1)
        with pytest.raises(ValueError, match=f"other arguments: {words}$"):
            run(name, resume=states.pop(), **changes)
    with pytest.raises(ValueError, match="method='distribution matching' .now 'gradient matching'"):
        gradient_matching(data(), networks=RandomNetworks(convnet), ipc=2, resume=states[0])
    done = run("DM", resume=states[-1])
    assert torch.equal(done.images, states[-1]["images"])
    assert done.info["loss"] == float(states[-1]["loss"])


def test_state_of_other_data_or_another_network_is_refused_by_name() -> None:
    """Data with equal counts and sums but other pixels; networks of another width, activation, norm, or weights."""
    states: list[Any] = []
    run("DM", callback=lambda progress: states.append(progress.state()))
    run("FedLGD", callback=lambda progress: states.append(progress.state()))
    dm, lgd = states[2], states[-1]
    options = {**OPTIONS["DM"], "networks": RandomNetworks(convnet), "ipc": 2, "steps": 5, "batch_real": 4, "lr": 0.1}
    real = data()
    for other in (
        real.replace(images=real.images.flip(3)),
        real.replace(normalization=Normalization((0.1, 0.2), (0.5, 0.5))),
        real.replace(labels=real.labels, columns={"age": torch.arange(len(real))}),
    ):
        with pytest.raises(ValueError, match=r"saved by a call with other arguments: data='\w+' \(now '\w+'\)$"):
            distribution_matching(other, resume=dm, **options)
    for factory in (lambda: convnet("batch"), lambda: convnet("none"), lambda: nn.Sequential(convnet())):
        with pytest.raises(ValueError, match="saved by a call with other arguments: network="):
            run("DM", resume=dm, networks=lambda f=factory: RandomNetworks(f))
    moved = frozen_net()
    with torch.no_grad():
        next(moved.parameters()).add_(0.01)
    with pytest.raises(ValueError, match="other arguments: network=.*outputs"):
        run("FedLGD", resume=lgd, networks=lambda: FixedNetwork(moved))
    with pytest.raises(ValueError, match="other arguments: augment="):
        run("DM", resume=dm, augment=DSA("flip"))


def test_condensation_without_saved_state_computes_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> dict[str, Any]:
        raise AssertionError

    monkeypatch.setattr("distillkit.condense._condensation.call_identity", never)
    run("DM", callback=lambda progress: progress.images.sum())


def test_call_advances_a_given_generator() -> None:
    generator = torch.Generator().manual_seed(3)
    first, second = run("DM", generator=generator), run("DM", generator=generator)
    assert not torch.equal(first.images, second.images)
    assert torch.equal(run("DM", generator=torch.Generator().manual_seed(3)).images, first.images)


def test_threads_are_independent() -> None:
    alone = [run(name).images for name in OPTIONS]
    found: dict[str, Tensor] = {}

    def work(name: str) -> None:
        found[name] = run(name).images

    threads = [threading.Thread(target=work, args=(name,)) for name in OPTIONS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[name], images) for name, images in zip(OPTIONS, alone, strict=True))


class Overlap(nn.Module):
    """Network that writes to itself, so it is not thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.classifier = convnet(), nn.Linear(32, CLASSES)

    def features(self, images: Tensor) -> Tensor:
        self.last = self.net.features(images)
        return self.last


class Plain(nn.Module):
    """Network without the split, which `split` hooks during a call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = convnet()

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


@pytest.fixture
def intra_op_threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("augment", [None, DSA()])
@pytest.mark.parametrize("make", [convnet, Overlap, Plain])
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
    with pytest.raises(ArithmeticError, match="of four"):
        distribution_matching(data((3, 4, 3)), networks=RandomNetworks(Once), ipc=2, steps=1, chunk=4)


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


def test_fixed_network_embeds_real_images_once() -> None:
    once, always = Counting(frozen_net(torch.float64)), Counting(frozen_net(torch.float64))
    options: dict[str, Any] = {"ipc": 1, "steps": 4, "lr": 0.1}
    cached = distribution_matching(data(dtype=torch.float64), networks=once, batch_real=2, **options)
    always.fixed = False
    papers = distribution_matching(data(dtype=torch.float64), networks=always, batch_real=None, **options)
    assert torch.allclose(cached.images, papers.images, rtol=0, atol=1e-12)
    trial = 2  # images of noise
    assert sum(once.seen) == trial + 21 + 4 * 3
    assert sum(always.seen) == trial + 4 * (21 + 3)
    batches = Counting(frozen_net())
    distribution_matching(data(), networks=batches, batch_real=6, augment=DSA(), **options)
    assert sum(batches.seen) == trial + 4 * (6 + 5 + 6 + 3)


def test_augmentation_is_drawn_once_per_class_and_step() -> None:
    calls: list[tuple[int, float]] = []

    def shift(images: Tensor, generator: torch.Generator, *, siamese: bool) -> Tensor:
        assert siamese
        drawn = torch.rand((), generator=generator)
        calls.append((len(images), float(drawn)))
        return images + drawn

    steps = 2
    distribution_matching(data(), networks=RandomNetworks(convnet), ipc=1, steps=steps, augment=shift, lr=0.1)
    real, synthetic = ([draw for n, draw in calls if (n == 1) == small] for small in (False, True))
    assert real == synthetic
    assert len(set(real)) == len(real) == steps * CLASSES


def test_real_batches_are_drawn_anew_without_replacement() -> None:
    images = torch.arange(10.0).view(10, 1, 1, 1).expand(-1, *SHAPE).contiguous()
    seen: list[set[float]] = []

    def note(batch: Tensor, generator: torch.Generator, *, siamese: bool) -> Tensor:
        if len(batch) > 1:
            seen.append(set(batch[:, 0, 0, 0].tolist()))
        return batch

    distribution_matching(
        images, torch.zeros(10, dtype=torch.int64), num_classes=CLASSES, networks=RandomNetworks(convnet), ipc=1,
        steps=6, batch_real=4, augment=note, lr=0.1,
    )  # fmt: skip
    assert [len(values) for values in seen] == [4] * 6
    assert any(a != b for a, b in pairwise(seen))
    assert len(set.union(*seen)) > 7


def test_absent_and_short_classes_are_reported() -> None:
    real = data((4, 0, 1))
    made = distribution_matching(real, networks=RandomNetworks(convnet), ipc=3, steps=2, lr=0.1)
    assert made.labels.tolist() == [0] * 3 + [2] * 3
    assert made.num_classes == CLASSES
    assert made.info["absent"] == [1]
    assert made.info["with_replacement"] == [2]
    assert bool(torch.isfinite(made.images).all())
    chosen = distribution_matching(real, networks=RandomNetworks(convnet), ipc=1, steps=1, classes=[2], lr=0.1)
    assert chosen.labels.tolist() == [2]
    with pytest.raises(ValueError, match=r"classes must have at least one image each, but \[1\] have none"):
        distribution_matching(real, networks=RandomNetworks(convnet), classes=[0, 1])


def test_zero_steps_return_the_initial_set_and_leave_inputs_unchanged() -> None:
    real, start = data(), data((1, 1, 1), seed=4)
    before, begun = real.images.clone(), start.images.clone()
    made = distribution_matching(real, networks=RandomNetworks(convnet), init=start, steps=0)
    assert [made.info[name] for name in ("lr", "momentum", "batch_real")] == [1.0, 0.5, 256]  # DM's defaults
    assert torch.equal(made.images, start.images[start.labels.argsort()])
    assert made.info["loss"] is None
    every = distribution_matching(real, networks=RandomNetworks(convnet), steps=0, batch_real=None)
    assert every.info["batch_real"] == len(real)
    distribution_matching(real, networks=RandomNetworks(convnet), init=start, steps=2, lr=0.1)
    assert torch.equal(real.images, before)
    assert torch.equal(start.images, begun)


class TenLines(nn.Module):
    """A user's network: it flattens with `view`, which fails on channels_last maps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 6, 3, stride=2)
        self.head = nn.Linear(6 * 5 * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        return self.head(x.view(x.shape[0], -1))


@pytest.mark.parametrize("match", ["embedding", "embedding+logits"])
def test_networks_with_any_channels_and_sizes_run(match: str) -> None:
    images = torch.randn(12, 5, 12, 10, generator=derive(0))
    labels = torch.arange(12) % 2
    with torch.no_grad():
        made = distribution_matching(
            images, labels, networks=RandomNetworks(TenLines), ipc=2, steps=3, match=match, lr=0.1
        )
    assert made.shape == (5, 12, 10)
    assert made.num_classes == 2
    network = split(build(TenLines, 0))
    means = embedding_means(network, images, [12], match=match, chunk=5)
    direct = (
        network.features(images) if match == "embedding" else torch.cat([network.features(images), network(images)], 1)
    )
    assert torch.allclose(means[0], direct.mean(0), atol=1e-6)


@pytest.mark.parametrize(("threads", "parts", "autocast", "others"), [
    (1, 3, False, False), (2, 1, False, False), (2, 3, True, False), (2, 2, False, True), (3, 5, False, True),
])  # fmt: skip
def test_groups_run_in_other_threads_only_if_that_helps(
    threads: int, parts: int, autocast: bool, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are in order; parts that run at once have their own networks, and at most `threads` of them exist."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    network = convnet()
    with torch.autocast("cpu", enabled=autocast), class_threads(torch.zeros(1)) as pool:
        made = ParallelMap(network, pool)(lambda own, part: (part, own, threading.get_ident()), range(parts))
    assert [part for part, *_ in made] == list(range(parts))
    assert {ident != threading.get_ident() for *_, ident in made} == {others}
    assert len({id(own) for _, own, _ in made}) <= min(threads, parts)
    assert others or all(own is network for _, own, _ in made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"momentum": 1.0}, "momentum must be less than 1"),
        ({"classes": [7]}, r"classes must be distinct and in \[0, 3\)"),
        ({"classes": [1, 1]}, "classes must be distinct"),
        ({"classes": []}, "at least one"),
        ({"num_classes": 4}, "the set has 3"),
        (
            {"networks": lambda: RandomNetworks(lambda: convnet().double())},
            "networks must have the dtype and device of the images",
        ),
    ],
)
def test_invalid_options_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("DM", **changes)


def test_invalid_data_are_named() -> None:
    networks = RandomNetworks(convnet)
    empty = LabeledImages(torch.zeros(0, *SHAPE), torch.zeros(0, dtype=torch.int64), num_classes=3)
    with pytest.raises(ValueError, match="at least one image, got an empty set"):
        distribution_matching(empty, networks=networks)
    other = data().replace(normalization=Normalization((0.5,), (0.5,)))
    with pytest.raises(ValueError, match="different normalizations"):
        distribution_matching(data(), networks=networks, init=other)
    for counts, words in (([4, 0, 5], "counts must be at least 1, got 0"), ([4, 4], "number of images, 9, got")):
        with pytest.raises(ValueError, match=words):
            embedding_means(frozen_net(), torch.zeros(9, *SHAPE), counts)
        with pytest.raises(ValueError, match=words):
            distance_to_means(frozen_net(), torch.zeros(len(counts), 4), torch.zeros(9, *SHAPE), counts)


def test_divergence_raises_an_error() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(128, 3)

        def features(self, images: Tensor) -> Tensor:
            return images.flatten(1).pow(3)

        def forward(self, images: Tensor) -> Tensor:
            return self.classifier(self.features(images))

    with pytest.raises(FloatingPointError, match=r"diverged; lower lr"):
        distribution_matching(data(), networks=RandomNetworks(Steep), ipc=1, steps=20, lr=10.0)


@pytest.mark.parametrize("method", ["distribution", "gradient"])
def test_every_step_draws_a_network_of_its_own(method: str) -> None:
    drawn: list[float] = []

    class Noting(RandomNetworks):
        def draw(self, generator: torch.Generator) -> Network:
            drawn.append(float(torch.rand((), generator=generator.clone_state())))
            return super().draw(generator)

    networks = Noting(convnet)
    drawn.clear()
    if method == "distribution":
        distribution_matching(data(), networks=networks, ipc=1, steps=6)
    else:
        gradient_matching(data(), networks=networks, ipc=1, iterations=6, inner=InnerTraining((1, 0)))
    assert len(drawn) == len(set(drawn)) == 6
