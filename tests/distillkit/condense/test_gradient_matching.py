from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit import LabeledImages, Normalization
from distillkit._utils.shares import share_of
from distillkit.augment import DSA, CropFlip
from distillkit.condense import InnerTraining, Progress, distribution_matching, initial_images, loops_for
from distillkit.condense._inner_training import TrainedNetwork
from distillkit.condense._parameter_gradient import _TwiceDifferentiable, parameter_gradient
from distillkit.condense._state import load_state, save_state
from distillkit.condense.gradient_matching import gradient_matching
from distillkit.condense.target_gradient import fit_to_gradient
from distillkit.losses.matching import gradient_distance
from distillkit.networks import ConvNet, build
from distillkit.networks.samplers import FixedNetwork, RandomNetworks
from distillkit.rng import derive
from distillkit.sets import TiledImages, Tiles
from tests.refused import refused


def data(counts: list[int], shape: tuple[int, int, int] = (1, 8, 8), seed: int = 0) -> LabeledImages:
    g = derive(seed, "data")
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    centers = torch.randn(len(counts), *shape, generator=g, dtype=torch.float64)
    images = centers[labels] + 0.3 * torch.randn(len(labels), *shape, generator=g, dtype=torch.float64)
    order = torch.randperm(len(labels), generator=g)
    return LabeledImages(images[order], labels[order], num_classes=len(counts))


def convnet(norm: str = "instance", classes: int = 2, channels: int = 1) -> Callable[[], nn.Module]:
    return lambda: ConvNet((channels, 8, 8), classes, width=4, depth=2, norm=norm, activation="silu").double()


def test_default_loops_are_interpolated_and_rounded_half_up() -> None:
    """Against NumPy's interpolation, whose numbers with a half are exact here."""
    ipc, inner = [1, 10, 20, 30, 40, 50, 100], [1, 50, 25, 20, 15, 10, 2]
    wanted = np.floor(np.interp(np.arange(1, 201), ipc, inner) + 0.5 + 1e-9)
    assert [loops_for(n) for n in range(1, 201)] == list(enumerate(wanted.astype(int).tolist(), 1))


def detached() -> nn.Module:
    network = convnet()()
    network.register_forward_hook(lambda module, inputs, output: output.detach())
    return network


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(64, 7), nn.Linear(7, 4), nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(images.flatten(1))))


def untracked() -> nn.Module:
    network = convnet("batch", 4)()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return network


REAL = data([5, 20, 0, 7]).replace(normalization=Normalization((0.5,), (0.2,)))
GIVEN = REAL[(REAL.labels != 1).nonzero().flatten()[:5]]
OPTIONS: dict[str, dict[str, Any]] = {
    "DC": {"batch_real": None},
    "DSA": {"augment": DSA(mode="M"), "batch_real": 4, "chunk": 2},
    "mse": {"metric": "mse", "init": "real", "chunk": 3, "lr": None},
    "cos": {"metric": "cos", "inner": InnerTraining((1, 0)), "classes": [3, 1], "lr": None},
    "batch norm": {"networks": RandomNetworks(convnet("batch", 4)), "batch_real": 5, "chunk": 2},
    "batch norm, views": {"networks": RandomNetworks(convnet("batch", 4)), "augment": DSA("flip"), "ipc": 1},
    "untracked": {"networks": FixedNetwork(build(untracked, 0))},
    "fixed": {"networks": FixedNetwork(build(convnet("batch", 4), 0))},
    "unused": {"networks": RandomNetworks(lambda: Unused().double()), "init": "statistics", "chunk": 1},
    "given": {"init": GIVEN, "inner": InnerTraining(lr=0.02), "iterations": 1},
    "tiles": {"parametrize": Tiles(2), "augment": DSA("flip_crop"), "ipc": 1, "lr": None},
    "given tiles": {"parametrize": Tiles(2), "init": Tiles(2).pack(REAL[(REAL.labels == 3).nonzero().flatten()[:4]])},
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "networks": RandomNetworks(convnet(classes=4)), "ipc": 2, "iterations": 2, "lr": 0.1, "batch_real": 6,
    "inner": InnerTraining((3, 2), lr=0.05, batch=5), "augment": None, "metric": "row_cosine",
}  # fmt: skip


def run(name: str, real: LabeledImages = REAL, **changes: Any) -> LabeledImages:
    return gradient_matching(real, **{**DEFAULTS, "progress": False, **OPTIONS[name], **changes})


def drawn(rows: Tensor, most: int | None, *keys: int | str) -> Tensor:
    """Return at most a given number of rows, drawn with the generator of the keys if there are more."""
    order = None if most is None or len(rows) <= most else torch.randperm(len(rows), generator=derive(*keys))
    return rows if order is None else rows[order[:most]]


def slow_dc(
    start: LabeledImages, seed: int, loops: tuple[int, int], *, networks: Any, inner: InnerTraining, iterations: int,
    batch_real: int | None, augment: DSA | None, metric: str, lr: float | None, parametrize: Tiles | None = None,
    **unused: Any,
) -> tuple[Tensor, list[float], float]:  # fmt: skip
    """Run DC's algorithm box with torch's own optimisers. Return the (stored) images, the losses and the rate."""
    stored, tiles = (start.stored if isinstance(start, TiledImages) else start.images).clone(), parametrize
    classes = {c: (REAL.labels == c).nonzero().flatten() for c in start.labels.unique().tolist()}
    velocity, losses = torch.zeros_like(stored), []

    def descent(images: Tensor, network: nn.Module, *step: int) -> tuple[Tensor, Tensor]:
        leaf = images.clone().requires_grad_()
        synthetic, loss = leaf if tiles is None else tiles.decode(leaf), torch.zeros((), dtype=torch.float64)
        for c, rows in classes.items():
            gradients = []
            for x in (REAL.images[drawn(rows, batch_real, seed, *step, "real", c)], synthetic[start.labels == c]):
                x = x if augment is None else augment(x, derive(seed, *step, c, "augment"), siamese=True)
                entropy = F.cross_entropy(network(x), torch.full((len(x),), c))
                weights = list(network.parameters())
                gradients.append(torch.autograd.grad(entropy, weights, create_graph=True, materialize_grads=True))
            loss = loss + gradient_distance(gradients[1], [g.detach() for g in gradients[0]], metric=metric)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    for i in range(iterations):
        network = copy.deepcopy(networks.draw(derive(seed, i, "network"))).requires_grad_(True)
        norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
        norms = [m for m in norms if m.training or m.running_mean is None]
        if norms and norms[0].running_mean is None:  # a twin with running statistics
            state, network = network.state_dict(), build(convnet("batch", 4), 0)
            network.load_state_dict(state, strict=False)
            norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
        sum_of_losses, weights = 0.0, torch.optim.SGD(network.parameters(), lr=inner.lr)
        for j in range(loops[0]):
            for norm in norms:
                norm.momentum = 1.0
                norm.train()
            mixed = [REAL.images[drawn(rows, 16, seed, i, j, "mixed", c)] for c, rows in classes.items()]
            with torch.no_grad():
                network(torch.cat(mixed))
            for norm in norms:
                norm.eval()
            if lr is None:
                noise = torch.randn(stored.shape, generator=derive(seed, "lr"), dtype=stored.dtype)
                size = float(descent(noise, network, i, j)[1].square().mean().sqrt())
                lr = float(f"{0.05 / REAL.normalization.std[0] / size:.3g}")
            loss, gradient = descent(stored, network, i, j)
            velocity = 0.5 * velocity + gradient
            stored = stored - lr * velocity
            sum_of_losses += float(loss) / loops[0]
            if j == loops[0] - 1:
                break
            draws, images = derive(seed, i, j, "train"), stored if tiles is None else tiles.decode(stored)
            for norm in norms:
                norm.train()
            for _ in range(loops[1]):
                batches = list(torch.randperm(len(images), generator=draws).split(inner.batch))
                if norms and len(batches) > 1 and len(batches[-1]) == 1:
                    batches[-2:] = [torch.cat(batches[-2:])]
                for index in batches:
                    x = images[index] if augment is None else augment(images[index], draws)
                    weights.zero_grad()
                    F.cross_entropy(network(x), start.labels[index]).backward()
                    weights.step()
        losses.append(sum_of_losses)
    assert lr is not None
    return stored, losses, lr


@pytest.mark.usefixtures("global_rng_untouched")
@pytest.mark.parametrize("name", OPTIONS)
def test_result_equals_the_algorithm_box_and_a_resumed_run_to_the_bit(name: str, tmp_path: Path) -> None:
    """Unequal classes, of which one is absent and one has more images than a batch."""
    seen: list[tuple[int, int, float]] = []
    generator, options = derive(3), {**DEFAULTS, **OPTIONS[name]}
    seed = int(torch.randint(2**62, (), generator=(other := generator.clone_state())))

    def save(progress: Progress) -> None:
        seen.append((progress.step, progress.steps, progress.loss))
        if progress.step == 1:
            save_state(tmp_path / "state", progress.state())

    made = run(name, callback=save, generator=generator)
    assert torch.equal(generator.get_state(), other.get_state())  # one draw
    how = {"init": options.get("init", "noise")}
    how |= {key: options[key] for key in ("classes", "parametrize") if key in options}
    start = initial_images(REAL, options["ipc"], generator=derive(seed, "init"), **how)
    loops = {"given": loops_for(3)}.get(name, options["inner"].loops)
    stored, losses, lr = slow_dc(start, seed, loops, **options)
    torch.testing.assert_close(made.stored if isinstance(made, TiledImages) else made.images, stored)
    assert not torch.equal(made.images, start.images)
    assert seen == [(i, len(losses), pytest.approx(loss)) for i, loss in enumerate(losses, 1)]
    assert torch.equal(made.labels, start.labels)
    assert (made.normalization, made.num_classes) == (REAL.normalization, 4)
    ipc = {"given": [3, 2], "given tiles": 1}.get(name, options["ipc"])
    facts = {"method": "gradient matching", "augment": options["augment"] and repr(options["augment"]), "seed": seed,
             "iterations": options["iterations"], "loops": list(loops), "lr_net": options["inner"].lr, "absent": [2],
             "batch_net": options["inner"].batch, "batch_real": options["batch_real"], "metric": options["metric"],
             "networks": repr(options["networks"]), "ipc": ipc, "momentum": 0.5, "lr": pytest.approx(lr),
             "init": how["init"] if isinstance(how["init"], str) else "given", "loss": seen[-1][2]}  # fmt: skip
    assert {key: made.info[key] for key in facts} == facts
    for resume in (tmp_path / "state", load_state(tmp_path / "state")):
        with torch.no_grad():  # has no effect on the call
            again = run(name, resume=resume, generator=99)
        assert torch.equal(again.images, made.images)
        assert again.info == made.info | {"generator": 99}


@pytest.mark.parametrize(("changes", "words"), [
    ({"batch_real": 4}, r"batch_real=6 \(now 4\)"),
    ({"metric": "mse"}, r"metric='row_cosine' \(now 'mse'\)"),
    ({"inner": InnerTraining((2, 2), lr=0.05, batch=5)}, r"loops=\[3, 2\] \(now \[2, 2\]\)"),
    ({"inner": InnerTraining((3, 2), lr=0.1, batch=5)}, r"lr_net=0\.05 \(now 0\.1\)"),
    ({"inner": InnerTraining((3, 2), lr=0.05)}, r"batch_net=5 \(now 256\)"),
])  # fmt: skip
def test_state_of_another_call_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    states: list[dict[str, Tensor]] = []
    run("DSA", iterations=1, batch_real=6, callback=lambda progress: states.append(progress.state()))
    with pytest.raises(ValueError, match=f"other arguments: {words}$"):
        run("DSA", **{"batch_real": 6, "resume": states[0], **changes})


def test_largest_class_of_a_given_start_determines_the_loops() -> None:
    tiled = Tiles(2).pack(REAL[(REAL.labels == 1).nonzero().flatten()[:8]])
    for start, most, tiles in ((REAL[:1], 1, None), (GIVEN, 3, None), (tiled, 2, Tiles(2))):
        made = run("DC", init=start, inner=InnerTraining(), iterations=0, parametrize=tiles)
        assert made.info["loops"] == list(loops_for(most))
    refused(lambda: run("DC", init=REAL[:2], inner=InnerTraining(), parametrize=Tiles(2)), ValueError, "multiple of 4")


def test_no_pass_exceeds_a_chunk_and_all_images_are_matched() -> None:
    sizes: list[int] = []

    def noting() -> nn.Module:
        network = convnet()()
        network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        return network

    options = {"networks": RandomNetworks(noting), "ipc": 3, "iterations": 1, "inner": InnerTraining((2, 1))}
    gradient_matching(data([6, 6]), chunk=2, **options)
    assert max(sizes) == 2
    every = [gradient_matching(data([300, 1]), batch_real=n, **options).images for n in (None, 300, 256)]
    assert torch.equal(every[0], every[1])
    assert not torch.equal(every[0], every[2])


def test_batches_of_one_image_are_refused_where_their_statistics_are_undefined() -> None:
    layers = [nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)]
    networks = RandomNetworks(lambda: nn.Sequential(*copy.deepcopy(layers)).double())
    single, trained, alone = REAL[torch.cat([(REAL.labels == c).nonzero()[: c + 1, 0] for c in (0, 1)])], (2, 1), [1]
    for accepted, loops, batch, options in (
        (True, trained, 2, {}), (False, trained, 1, {}), (True, (1, 1), 1, {}), (True, (2, 0), 1, {}),
        (False, trained, 2, {"classes": alone}), (True, (2, 0), 2, {"classes": alone}),
        (True, trained, 2, {"classes": alone, "ipc": 2, "batch_real": 1}), (True, trained, 2, {"real": single}),
        (False, (1, 0), 2, {"real": single, "classes": [0], "ipc": 2}),
    ):  # fmt: skip
        how = {"networks": networks, "ipc": 1, "iterations": 1, "inner": InnerTraining(loops, batch=batch), **options}
        with contextlib.nullcontext() if accepted else pytest.raises(ValueError, match="a batch of one image"):
            run("DC", **how)
    how = {"networks": networks, "ipc": 1, "steps": 1, "batch_real": 1, "progress": False}
    distribution_matching(REAL, **how)
    for ones in ({"batch_real": 2}, {"ipc": 2}):
        call = lambda o=ones: distribution_matching(REAL, classes=[1], **{**how, **o})  # noqa: E731
        refused(call, ValueError, "cannot normalize a batch of one image")


def test_fixed_statistics_are_those_of_the_batch_whatever_they_were() -> None:
    network = nn.Sequential(nn.BatchNorm2d(3)).double()
    network[0].running_mean[0], network[0].running_var[1] = torch.nan, torch.inf  # type: ignore[index, operator]
    trained, images = TrainedNetwork(cast(Any, network), None), data([5], (3, 4, 8)).images
    trained.fix_statistics(images)
    (norm,) = trained.norms
    torch.testing.assert_close(norm.running_mean, images.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, images.var((0, 2, 3)))
    assert not norm.training


def test_numbers_of_loops_have_bounds() -> None:
    for options, words in (
        ({"loops": (0, 1)}, r"loops\[0\]"), ({"loops": (1, -1)}, r"loops\[1\]"), ({"loops": (1, 2, 3)}, "^loops must"),
        ({"lr": -1.0}, "^lr must"), ({"batch": 0}, "^batch must"),
    ):  # fmt: skip
        refused(lambda o=options: InnerTraining(**o), (TypeError, ValueError), words)


def test_networks_of_another_dtype_and_divergence_are_refused() -> None:
    real = data([3, 3])
    refused(lambda: run("DC", iterations=-1), ValueError, "iterations must be")
    split = r"^over_classes cannot split this call, because networks train on .* pass inner with loops=\(1, 0\)$"
    loops = {(1, 0): None, (1, 1): None, (2, 0): None, (2, 1): split}
    cut = lambda images, generator, siamese: images.detach()  # noqa: E731
    for changes, words in (
        ({"networks": RandomNetworks(convnet(classes=3))}, "networks must return 2 logits"),
        ({"networks": convnet()()}, "^networks must be"),
        ({"batch_real": 0}, "batch_real must be at least 1"),
        ({"inner": (2, 1)}, r"^inner must be an InnerTraining\(.*got tuple$"),
        ({"lr": None}, "because lr=None chooses a rate for all classes; pass a number as lr$"),
        ({"init": data([1, 1])}, None),
        ({"init": "statistics"}, "because init='statistics' draws all classes together; pass 'real' or a set as init$"),
        ({"networks": RandomNetworks(convnet("batch"))}, "statistics of all classes; use group norm$"),
        ({"augment": cut}, "augment must be differentiable with respect to its images"),
        ({"augment": CropFlip(Normalization((0.5,), (0.2,)))}, "^augment pads with black for"),
        ({"networks": RandomNetworks(detached)}, "^networks must be differentiable with respect to their parameters"),
        *(({"inner": InnerTraining(given)}, words) for given, words in loops.items()),
    ):
        how = {"networks": RandomNetworks(convnet()), "ipc": 1, "iterations": 1, "init": "real", **changes}
        expected = pytest.raises((TypeError, ValueError), match=words) if words else contextlib.nullcontext()
        with share_of("over_classes"), expected:
            gradient_matching(real, **how)
    with share_of("over_repeats"):  # each repeat chooses its own rate
        assert run("cos", iterations=0).info["lr"] is None
    with pytest.raises(ValueError, match="float32"):
        gradient_matching(real.to(dtype=torch.float32), networks=RandomNetworks(convnet()), ipc=1, iterations=1)
    how = {"networks": RandomNetworks(lambda: convnet()().float()), "inner": InnerTraining((2, 1)), "lr": 1e37}
    with pytest.raises(FloatingPointError, match="lower lr"):
        gradient_matching(real.to(dtype=torch.float32), ipc=1, iterations=9, metric="mse", **how)


def server_case() -> tuple[nn.Module, LabeledImages, list[Tensor]]:
    network = build(convnet(), 1)
    target = parameter_gradient(network, list(network.parameters()), *data([20, 20], seed=4))
    return network, data([2, 3], seed=5), target


FITS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "indices": (convnet(), {"lr": 0.7, "momentum": 0.9}),
    "rows": (convnet(), {"lr": 0.7, "chunk": 2}),
    "some parameters": (convnet(), {}),
    "more outputs": (convnet(classes=3), {"chunk": 1}),
    "one parameter": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2, bias=False)).double(), {"chunk": 2}),
    "batch norm": (lambda: nn.Sequential(convnet("batch")(), nn.Dropout(0.5)), {"lr": 0.3, "momentum": 0.0}),
    "untracked": (untracked, {"chunk": 2}),
}


@pytest.mark.usefixtures("global_rng_untouched")
@pytest.mark.parametrize("metric", ["row_cosine", "mse", "cos"])
@pytest.mark.parametrize("name", FITS)
def test_fit_equals_torch_sgd_on_the_distance_and_a_resumed_run_to_the_bit(name: str, metric: Any) -> None:
    """Of a network in training mode, which keeps its mode, parameters and statistics."""
    factory, options = FITS[name]
    network = build(factory, 1)
    with torch.no_grad(), torch.random.fork_rng():  # dropout draws
        network(data([20, 20], seed=4).images)
    start = data([2, 3], seed=5).replace(columns={"client": torch.arange(5)}, info={"epsilon": 1.0, "of": "x"})
    if name == "rows":
        start = start.replace(labels=torch.rand(5, 2, generator=derive(3), dtype=torch.float64).softmax(1))
    matched = dict(network.named_parameters())
    if name == "some parameters":
        matched = {key: matched[key] for key in ("classifier.weight", next(iter(matched)))}
    named = {key: torch.randn(p.shape, generator=derive(4), dtype=p.dtype) for key, p in matched.items()}
    before, twin = copy.deepcopy(network.state_dict()), copy.deepcopy(network).eval()
    parameters = [dict(twin.named_parameters())[key] for key in matched]
    leaf, losses = start.images.clone().requires_grad_(), []
    sgd = torch.optim.SGD([leaf], lr=options.get("lr", 1.0), momentum=options.get("momentum", 0.5))
    for _ in range(3):
        g = torch.autograd.grad(F.cross_entropy(twin(leaf), start.labels), parameters, create_graph=True)
        sgd.zero_grad()
        losses.append(loss := gradient_distance(g, list(named.values()), metric=metric))
        loss.backward()
        sgd.step()
    targets: list[Any] = [named]
    targets += [] if name == "some parameters" else [list(named.values())]
    for target in targets:
        seen: list[Progress] = []
        states: list[dict[str, Tensor]] = []
        how: dict[str, Any] = {"steps": 3, "metric": metric, "progress": False, **options}
        keep = lambda p, a=seen, b=states: (a.append(p), b.append(p.state()))  # noqa: E731
        made = fit_to_gradient(network, start, target, callback=keep, **how)
        torch.testing.assert_close(made.images, leaf.detach())
        assert [(p.step, p.steps, pytest.approx(p.loss)) for p in seen] == [
            (k, 3, float(loss)) for k, loss in enumerate(losses, 1)
        ]
    assert torch.equal(made.labels, start.labels)
    assert (made.columns, made.num_classes, network.training) == ({}, 2, True)
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key]), key
    facts = {"method": "gradient matching to a target", "metric": metric, "steps": 3, "lr": options.get("lr", 1.0),
             "momentum": options.get("momentum", 0.5), "of": "x", "epsilon": None}  # fmt: skip
    assert facts.items() <= made.info.items()
    assert "a target gradient of unknown origin" in made.info["reason"]
    with torch.no_grad():
        again = fit_to_gradient(network.eval().requires_grad_(False), start, target, resume=states[0], **how)
    assert torch.equal(again.images, made.images)
    assert again.info == made.info
    assert torch.equal(fit_to_gradient(network, start[:1], target, **{**how, "steps": 0}).images, start.images[:1])


def test_no_pass_of_a_fit_exceeds_a_chunk_and_divergence_stops() -> None:
    network, start, target = server_case()
    sizes: list[int] = []
    with network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0]))):
        fit_to_gradient(network, start, target, steps=2, chunk=2)
    assert max(sizes) == 2
    far, wide = [1e6 * t.float() for t in target], start.to(dtype=torch.float32)
    call = lambda: fit_to_gradient(network.float(), wide, far, steps=1, lr=1e37, metric="mse")  # noqa: E731
    refused(call, FloatingPointError, "lower lr")


def test_state_of_another_fit_is_refused_by_name() -> None:
    network, start, target = server_case()
    states: list[dict[str, Tensor]] = []
    fit_to_gradient(network, start, target, steps=2, callback=lambda p: states.append(p.state()))
    moved = copy.deepcopy(network)
    next(moved.parameters()).data.mul_(1.01)
    flipped = start.replace(images=-start.images)
    for words, (net, data_, aim, options) in {
        r"lr=1\.0 \(now 0\.5\)$": (network, start, target, {"lr": 0.5}),
        r"momentum=0\.5 \(now 0\.1\)$": (network, start, target, {"momentum": 0.1}),
        r"metric='row_cosine' \(now 'cos'\)$": (network, start, target, {"metric": "cos"}),
        "target='[^=]*$": (network, start, [*target[:-1], -target[-1]], {}),
        "data='[^=]*$": (network, flipped, target, {}),
        "network=": (moved, start, target, {}),
    }.items():
        call = lambda n=net, d=data_, a=aim, o=options: fit_to_gradient(n, d, a, steps=4, resume=states[1], **o)  # noqa: E731
        refused(call, ValueError, f"other arguments: {words}")


def test_fit_to_gradient_refuses_mismatched_targets() -> None:
    network, start, target = server_case()
    for few in (target[:-1], [*target, target[0]]):
        words = f"^target must hold a tensor for each of the {len(target)} parameters, got {len(few)}$"
        refused(lambda t=few: fit_to_gradient(network, start, t), ValueError, words)
    with pytest.raises(ValueError, match="no parameters of the network: 3, mask$"):
        fit_to_gradient(network, start, {"mask": target[0], 3: target[0]})  # type: ignore[dict-item]
    refused(lambda: fit_to_gradient(network, 3, target), TypeError, "^synthetic must be")  # type: ignore[arg-type]
    for wrong, words in (
        (torch.zeros(3), r"be a tensor \[2\], got \[3\]"), (torch.zeros(2, 1), r"be a tensor \[2\], got \[2, 1\]"),
        ([0.0, 0.0], r"be a tensor \[2\], got list"), (torch.tensor([1.0, torch.nan]), "be finite, got NaN or Inf"),
        (torch.tensor([torch.inf, 1.0]), "be finite, got NaN or Inf"), (torch.zeros(2, device="meta"), "have values.*"),
    ):  # fmt: skip
        call = lambda w=wrong: fit_to_gradient(network, start, [*target[:-1], w])  # noqa: E731
        refused(call, ValueError, f"^target for classifier.bias must {words}$")
    refused(lambda: fit_to_gradient(detached(), start, target), ValueError, "^network must be .* to its parameters")
    refused(lambda: fit_to_gradient(network, start[:0], target), ValueError, "synthetic must hold at least one image")
    refused(lambda: fit_to_gradient(network, start, {}), ValueError, "target must hold at least one")
    empty = copy.deepcopy(network).to("meta")
    refused(lambda: fit_to_gradient(empty, start, target), ValueError, "^network must be one with values")
    refused(lambda: fit_to_gradient(network, start, target, lr=None), TypeError, "^lr must be")  # type: ignore[arg-type]
    refused(lambda: fit_to_gradient(network, start.replace(num_classes=3), target), ValueError, "must return 3 logits")


MASK = torch.tensor([[True, False, True], [True, True, False], [False, True, True], [True, True, True]])
ATTENTION = [
    {}, {"scale": 0.3}, {"is_causal": True}, {"attn_mask": MASK}, {"attn_mask": MASK.double().log1p()},
    {"enable_gqa": True},
]  # fmt: skip


@pytest.mark.parametrize(
    "options", ATTENTION, ids=["plain", "scale", "causal", "mask of truths", "mask of numbers", "shared heads"]
)
@pytest.mark.parametrize("lead", [(2,), (), (3, 2)])
def test_unfused_attention_equals_pytorchs_for_all_options(options: dict[str, object], lead: tuple[int, ...]) -> None:
    """The fused implementation is correct, but cannot be differentiated twice."""
    heads = 2 if "enable_gqa" in options else 6
    query = torch.randn(*lead, 6, 4, 5, generator=derive(0), dtype=torch.float64).requires_grad_()
    key, value = torch.randn(2, *lead, heads, 3, 5, generator=derive(1), dtype=torch.float64)
    expected = F.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
    with _TwiceDifferentiable(query):
        found = F.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
        dropped = F.scaled_dot_product_attention(query, key, value, dropout_p=1.0, **options)  # type: ignore[arg-type]
        attended, _ = nn.MultiheadAttention(5, 1).double()(*[query.flatten(0, -3)] * 3, need_weights=False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for output in (found, attended):
        (slope,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        assert torch.autograd.grad(slope.square().sum(), query, retain_graph=True)[0].any()
    assert not dropped.any()
