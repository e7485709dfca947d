from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit import LabeledImages, Normalization
from distillkit.augment import DSA
from distillkit.condense import InnerTraining, Progress, load_state, loops_for, save_state
from distillkit.condense._inner_training import TrainedNetwork
from distillkit.condense._parameter_gradient import _TwiceDifferentiable, distance_to_target, parameter_gradient
from distillkit.condense.gradient_matching import gradient_matching
from distillkit.condense.target_gradient import fit_to_gradient
from distillkit.losses.matching import gradient_distance
from distillkit.networks import ConvNet, build
from distillkit.networks.samplers import FixedNetwork, RandomNetworks
from distillkit.rng import derive
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


class TenLines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5 * 6 * 6, 7)
        self.last = nn.Linear(7, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(images.flatten(1))))


def test_default_loops_are_interpolated_and_rounded_half_up() -> None:
    """Against NumPy's interpolation, whose numbers with a half are exact here."""
    ipc, inner = [1, 10, 20, 30, 40, 50, 100], [1, 50, 25, 20, 15, 10, 2]
    wanted = np.floor(np.interp(np.arange(1, 201), ipc, inner) + 0.5 + 1e-9)
    assert [loops_for(n) for n in range(1, 201)] == list(enumerate(wanted.astype(int).tolist(), 1))


@pytest.mark.parametrize("chunk", [1, 3, 5, 16, None])
def test_chunked_parameter_gradient_equals_the_whole_one(chunk: int | None) -> None:
    real = data([4, 3])
    network = build(convnet(), 0)
    parameters = list(network.parameters())
    want = torch.autograd.grad(F.cross_entropy(network(real.images), real.labels), parameters)
    got = parameter_gradient(network, parameters, *real, chunk=chunk)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
        assert not a.requires_grad


@pytest.mark.parametrize("metric", ["row_cosine", "mse", "cos"])
def test_chunked_distance_to_target_is_correct(metric: str) -> None:
    synthetic = data([3, 2])
    network = build(convnet(), 0)
    parameters = list(network.parameters())
    targets = parameter_gradient(network, parameters, *data([9, 9], seed=1))

    def distance(images: Tensor) -> Tensor:
        g = torch.autograd.grad(F.cross_entropy(network(images), synthetic.labels), parameters, create_graph=True)
        return gradient_distance(g, targets, metric=metric)

    value, gradient = distance_to_target(network, parameters, *synthetic, targets, metric=metric)
    torch.testing.assert_close(value, distance(synthetic.images).detach())
    for chunk in (1, 2):
        again = distance_to_target(network, parameters, *synthetic, targets, metric=metric, chunk=chunk)
        torch.testing.assert_close(again, (value, gradient))
    way = torch.randn(gradient.shape, generator=derive(2), dtype=torch.float64)
    ahead, behind = (distance(synthetic.images + sign * 1e-5 * way).detach() for sign in (1, -1))
    torch.testing.assert_close((ahead - behind) / 2e-5, (gradient * way).sum(), rtol=1e-5, atol=1e-7)


def slow_dc(
    real: LabeledImages, start: Tensor, network: nn.Module, outer: int, inner: int, augment: DSA | None, seed: int
) -> tuple[Tensor, float]:
    """Run DC's algorithm box with torch's own optimisers, all real images of a class in each step, one network."""
    ipc = len(start) // real.num_classes
    labels = torch.arange(real.num_classes).repeat_interleave(ipc)
    synthetic = start.clone().requires_grad_()
    pixels = torch.optim.SGD([synthetic], lr=0.1, momentum=0.5)
    weights = torch.optim.SGD(network.parameters(), lr=0.05)
    norms, losses = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)], []
    for j in range(outer):
        for norm in norms:
            norm.momentum = 1.0
            norm.train()
        with torch.no_grad():
            network(real.images)  # fewer than 16 of each class: the mixed batch has all of them
        for norm in norms:
            norm.eval()
        loss = torch.zeros((), dtype=torch.float64)
        for c in range(real.num_classes):
            x, s = real.images[real.labels == c], synthetic[labels == c]
            if augment is not None:
                x = augment(x, derive(seed, 0, j, c, "augment"), siamese=True)
                s = augment(s, derive(seed, 0, j, c, "augment"), siamese=True)
            target = torch.autograd.grad(F.cross_entropy(network(x), torch.full((len(x),), c)), network.parameters())
            g = torch.autograd.grad(
                F.cross_entropy(network(s), torch.full((ipc,), c)), network.parameters(), create_graph=True
            )
            for a, b in zip(g, target, strict=True):
                if a.ndim > 1:
                    for row, other in zip(a.flatten(1), b.flatten(1), strict=True):
                        loss = loss + 1 - (row @ other) / (row.norm() * other.norm() + 1e-6)
        pixels.zero_grad()
        loss.backward()
        pixels.step()
        losses.append(float(loss))
        if j == outer - 1:
            break
        draws = derive(seed, 0, j, "train")
        for norm in norms:
            norm.train()
        for _ in range(inner):
            size = 4 if norms else 3  # a last batch of one image is merged
            for index in torch.randperm(len(labels), generator=draws).split(size):
                x = synthetic.detach()[index]
                x = x if augment is None else augment(x, draws)
                weights.zero_grad()
                F.cross_entropy(network(x), labels[index]).backward()
                weights.step()
    return synthetic.detach(), sum(losses) / outer


@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("augment", [None, DSA(mode="M")])
def test_result_equals_the_algorithm_box(augment: DSA | None, norm: str, global_rng_untouched: None) -> None:
    real, generator = data([5, 7]), derive(3)
    seed = int(torch.randint(2**62, (), generator=generator.clone_state()))
    states: list[Progress] = []
    got = gradient_matching(
        real,
        networks=RandomNetworks(convnet(norm)),
        ipc=2,
        iterations=1,
        inner=InnerTraining(loops=(3, 2), lr=0.05, batch=3),
        batch_real=None,
        lr=0.1,
        augment=augment,
        generator=generator,
        chunk=2,
        callback=states.append,
    )
    start = torch.randn(4, 1, 8, 8, generator=derive(seed, "init"), dtype=torch.float64)
    want, loss = slow_dc(real, start, build(convnet(norm), derive(seed, 0, "network")), 3, 2, augment, seed)
    torch.testing.assert_close(got.images, want)
    assert not torch.equal(got.images, start)
    assert got.labels.tolist() == [0, 0, 1, 1]
    facts = {"method": "gradient matching", "augment": augment and repr(augment), "seed": seed, "iterations": 1,
             "loops": [3, 2], "lr_net": 0.05, "batch_net": 3, "batch_real": None, "metric": "row_cosine"}  # fmt: skip
    assert {key: got.info[key] for key in facts} == facts
    assert [(p.step, p.loss) for p in states] == [(1, pytest.approx(loss))]


def test_resumes_bitwise_equal_and_names_differences(tmp_path: Path) -> None:
    real = data([6, 6])
    options = {
        "networks": RandomNetworks(convnet()),
        "ipc": 2,
        "inner": InnerTraining(loops=(2, 1)),
        "batch_real": 3,
        "augment": DSA(),
    }
    whole = gradient_matching(real, iterations=4, generator=1, **options)

    def keep(progress: Progress) -> None:
        if progress.step == 2:
            save_state(tmp_path / "state.safetensors", progress.state())

    gradient_matching(real, iterations=3, generator=1, callback=keep, **options)
    for resume in (tmp_path / "state.safetensors", load_state(tmp_path / "state.safetensors")):
        again = gradient_matching(real, iterations=4, generator=99, resume=resume, **options)
        assert torch.equal(again.images, whole.images)
    for changes, words in (
        ({"batch_real": 4}, r"batch_real=3 \(now 4\)"),
        ({"metric": "mse"}, r"metric='row_cosine' \(now 'mse'\)"),
        ({"inner": InnerTraining(loops=(2, 2))}, r"loops=\[2, 1\] \(now \[2, 2\]\)"),
        ({"inner": InnerTraining(loops=(2, 1), lr=0.1)}, r"lr_net=0\.01 \(now 0\.1\)"),
        ({"inner": InnerTraining(loops=(2, 1), batch=3)}, r"batch_net=256 \(now 3\)"),
    ):
        with pytest.raises(ValueError, match=f"other arguments: {words}$"):
            gradient_matching(real, iterations=4, resume=resume, **{**options, **changes})
    with pytest.raises(ValueError, match=r"other arguments: data='\w+' \(now '\w+'\)$"):
        gradient_matching(real.replace(images=-real.images), iterations=4, resume=resume, **options)
    other = {**options, "networks": RandomNetworks(convnet(norm="none"))}
    with pytest.raises(ValueError, match=r"other arguments: network="):
        gradient_matching(real, iterations=4, resume=resume, **other)


def test_int_seed_is_reproducible_and_generator_is_advanced() -> None:
    real = data([4, 4])

    def run(generator: int | torch.Generator) -> Tensor:
        return gradient_matching(
            real, networks=RandomNetworks(convnet()), ipc=1, iterations=1, generator=generator
        ).images

    g = derive(0)
    assert torch.equal(run(0), run(0))
    assert torch.equal(run(0), run(g))
    assert not torch.equal(run(0), run(g))


def test_runs_where_the_caller_has_disabled_gradients() -> None:
    real, network = data([4, 4]), build(convnet(), 0)
    networks = RandomNetworks(convnet())
    outside = gradient_matching(
        real, networks=networks, ipc=1, iterations=1, inner=InnerTraining((2, 1)), augment=DSA()
    )
    target = parameter_gradient(network, list(network.parameters()), *real)
    with torch.no_grad():
        inside = gradient_matching(
            real, networks=networks, ipc=1, iterations=1, inner=InnerTraining((2, 1)), augment=DSA()
        )
        moved = fit_to_gradient(network, outside, target, steps=1)
    assert torch.equal(inside.images, outside.images)
    assert not torch.equal(moved.images, outside.images)


def test_short_missing_and_unbalanced_classes() -> None:
    real = data([2, 9, 0, 4])
    made = gradient_matching(
        real,
        networks=RandomNetworks(convnet(classes=4)),
        ipc=3,
        iterations=1,
        inner=InnerTraining((1, 1)),
        init="real",
    )
    assert made.counts().tolist() == [3, 3, 0, 3]
    assert made.info["absent"] == [2]
    assert made.info["with_replacement"] == [0]
    one = gradient_matching(
        real,
        networks=RandomNetworks(convnet(classes=4)),
        ipc=3,
        iterations=1,
        inner=InnerTraining((1, 1)),
        classes=[1],
    )
    assert one.labels.tolist() == [1, 1, 1]


def test_initial_set_with_its_own_counts_is_continued() -> None:
    real = data([5, 5]).replace(normalization=Normalization((0.5,), (0.2,)))
    start = real[real.labels.argsort(stable=True)][torch.tensor([0, 5, 6, 7])]
    made = gradient_matching(
        real, networks=RandomNetworks(convnet()), iterations=1, inner=InnerTraining(lr=0.0), init=start
    )
    assert made.info["loops"] == list(loops_for(3))
    single = gradient_matching(real, networks=RandomNetworks(convnet()), iterations=0, init=start[:2])
    assert single.info["loops"] == list(loops_for(1))
    assert made.counts().tolist() == [1, 3]
    assert made.normalization == real.normalization
    assert made.info["init"] == "given"
    assert not torch.equal(made.images, start.images)


def test_no_pass_exceeds_a_chunk() -> None:
    sizes: list[int] = []

    def noting() -> nn.Module:
        network = convnet()()
        network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        return network

    options = {"networks": RandomNetworks(noting), "ipc": 3, "iterations": 1, "inner": InnerTraining((2, 1))}
    gradient_matching(data([6, 6]), chunk=2, **options)
    assert max(sizes) == 2


def test_batch_norm_uses_mixed_batch_statistics_for_any_chunk() -> None:
    real = data([6, 6])
    factory = convnet(norm="batch")
    options = {"networks": RandomNetworks(factory), "ipc": 2, "iterations": 1, "batch_real": 5, "generator": 2}
    a, b = (gradient_matching(real, inner=InnerTraining((1, 0)), chunk=chunk, **options).images for chunk in (1, 12))
    torch.testing.assert_close(a, b)  # in the matching, statistics are fixed, so chunks are exact

    seed = int(torch.randint(2**62, (), generator=derive(2)))
    network = build(factory, derive(seed, 0, "network")).train()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 1.0
    with torch.no_grad():
        network(real.images)  # 16 a class are all of them
    network.eval()
    start = torch.randn(4, 1, 8, 8, generator=derive(seed, "init"), dtype=torch.float64)
    parameters, want = list(network.parameters()), []
    for c in (0, 1):
        own = (real.labels == c).nonzero().flatten()
        rows = own[torch.randperm(6, generator=derive(seed, 0, 0, "real", c))[:5]]
        target = parameter_gradient(network, parameters, real.images[rows], torch.full((5,), c))
        want.append(distance_to_target(network, parameters, start[2 * c :][:2], torch.full((2,), c), target)[1])
    torch.testing.assert_close(a, start - 0.1 * torch.cat(want))
    trained = gradient_matching(real, inner=InnerTraining((2, 1)), **options)
    assert bool(torch.isfinite(trained.images).all())


def test_every_matching_step_takes_statistics_of_other_images(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(TrainedNetwork, "fix_statistics", lambda self, images: seen.append(images))
    options = {"networks": RandomNetworks(convnet("batch")), "ipc": 1, "inner": InnerTraining((2, 0))}
    gradient_matching(data([20, 17]), iterations=2, **options)
    assert [len(x.unique(dim=0)) for x in seen] == [32] * 4
    assert len({tuple(x.flatten(1).sum(1).sort().values.tolist()) for x in seen}) == 4


def test_untracked_batch_norm_uses_mixed_batch_statistics() -> None:
    def untracked() -> nn.Module:
        network = convnet(norm="batch")()
        for norm in network.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.track_running_stats = False
                norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        return network

    options = {"ipc": 2, "iterations": 1, "inner": InnerTraining(loops=(2, 1)), "generator": 2}
    a, b = (
        gradient_matching(data([6, 6]), networks=RandomNetworks(factory), **options).images
        for factory in (convnet(norm="batch"), untracked)
    )
    assert torch.equal(a, b)

    real, seed = data([6, 6]), int(torch.randint(2**62, (), generator=derive(2)))
    start = torch.randn(4, 1, 8, 8, generator=derive(seed, "init"), dtype=torch.float64)
    options["inner"] = InnerTraining((3, 2), lr=0.05, batch=3)
    frozen = FixedNetwork(build(untracked, 0))  # in eval mode, where it has no other statistics either
    fixed = gradient_matching(real, networks=frozen, batch_real=None, **options)
    want, _ = slow_dc(real, start, build(convnet("batch"), 0), 3, 2, None, seed)
    torch.testing.assert_close(fixed.images, want)


def test_fixed_network_with_batch_norm_is_unchanged() -> None:
    real, model = data([6, 6]), build(convnet(norm="batch"), 0)
    samplers = (FixedNetwork(model), RandomNetworks(convnet(norm="batch")))
    assert [len(TrainedNetwork(sampler.draw(derive(0)), None).norms) for sampler in samplers] == [0, 2]
    model(real.images)
    before = copy.deepcopy(model.state_dict())
    gradient_matching(real, networks=FixedNetwork(model), ipc=1, iterations=2, inner=InnerTraining((2, 2)))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_networks_with_any_channels_run() -> None:
    real = data([4, 4], (5, 6, 6)).to(dtype=torch.float32)
    made = gradient_matching(
        real, networks=RandomNetworks(TenLines), ipc=1, iterations=1, inner=InnerTraining((2, 1)), augment=DSA()
    )
    assert made.images.shape == (2, 5, 6, 6)
    assert made.images.dtype == torch.float32


def test_numbers_of_loops_have_bounds() -> None:
    refused(lambda: InnerTraining(loops=(0, 1)), ValueError, r"loops\[0\]")
    refused(lambda: InnerTraining(loops=(1, -1)), ValueError, r"loops\[1\]")


def test_networks_of_another_dtype_and_divergence_are_refused() -> None:
    real = data([3, 3])
    with pytest.raises(ValueError, match="iterations must be"):
        gradient_matching(real, networks=RandomNetworks(convnet()), ipc=1, iterations=-1)
    with pytest.raises(ValueError, match="float32"):
        gradient_matching(real.to(dtype=torch.float32), networks=RandomNetworks(convnet()), ipc=1, iterations=1)
    with pytest.raises(FloatingPointError, match="lower lr"):
        gradient_matching(
            real.to(dtype=torch.float32),
            networks=RandomNetworks(lambda: convnet()().float()),
            ipc=1,
            iterations=9,
            inner=InnerTraining((2, 1)),
            lr=1e37,
            metric="mse",
        )


def server_case() -> tuple[nn.Module, LabeledImages, list[Tensor]]:
    network = build(convnet(), 1)
    target = parameter_gradient(network, list(network.parameters()), *data([20, 20], seed=4))
    return network, data([2, 3], seed=5), target


def test_fit_to_gradient_equals_torch_sgd_on_the_distance(global_rng_untouched: None) -> None:
    network, start, target = server_case()
    before = copy.deepcopy(network.state_dict())
    named = dict(zip(dict(network.named_parameters()), target, strict=True))
    leaf = start.images.clone().requires_grad_()
    sgd = torch.optim.SGD([leaf], lr=0.7, momentum=0.9)
    for _ in range(3):
        g = torch.autograd.grad(
            F.cross_entropy(network(leaf), start.labels), list(network.parameters()), create_graph=True
        )
        sgd.zero_grad()
        gradient_distance(g, target).backward()
        sgd.step()
    for given in (target, named, {name: 7 * t for name, t in named.items()}):
        losses: list[float] = []
        how = {"lr": 0.7, "momentum": 0.9, "callback": lambda p, to=losses: to.append(p.loss)}
        made = fit_to_gradient(network, start, given, steps=3, **how)
        torch.testing.assert_close(made.images, leaf.detach(), rtol=1e-3, atol=1e-5)
        assert losses[-1] < losses[0]
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(made.labels, start.labels)
    assert made.info["steps"] == 3


def test_fit_to_gradient_uses_running_statistics_in_either_mode() -> None:
    network = build(lambda: nn.Sequential(convnet("batch")(), nn.Dropout(0.5)), 1)
    with torch.no_grad():
        network(data([20, 20], seed=4).images)
    start, target = data([2, 3], seed=5), [torch.ones_like(p) for p in network.parameters()]
    found = [
        fit_to_gradient(network.train(mode), start, target, steps=2, metric="mse").images for mode in (True, False)
    ]
    assert torch.equal(*found)
    network.eval()
    leaf = start.images.clone().requires_grad_()
    g = torch.autograd.grad(F.cross_entropy(network(leaf), start.labels), list(network.parameters()), create_graph=True)
    moved = leaf - torch.autograd.grad(gradient_distance(g, target, metric="mse"), leaf)[0]
    once = fit_to_gradient(network.train(), start, target, steps=1, metric="mse")
    torch.testing.assert_close(once.images, moved.detach())
    assert network.training


def test_fit_to_gradient_with_some_parameters_soft_labels_and_chunks() -> None:
    network, start, target = server_case()
    rows = start.replace(labels=F.one_hot(start.labels, 2).double(), columns={"client": torch.arange(5)})
    by_index = fit_to_gradient(network, start, target, steps=2)
    sizes: list[int] = []
    with network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0]))):
        by_row = fit_to_gradient(network, rows, target, steps=2, chunk=2)
    assert max(sizes) == 2
    torch.testing.assert_close(by_index.images, by_row.images)
    more = build(convnet(classes=3), 1)
    assert fit_to_gradient(more, start, [torch.ones_like(p) for p in more.parameters()], steps=1).num_classes == 2
    far, wide = [1e6 * t.float() for t in target], start.to(dtype=torch.float32)
    call = lambda: fit_to_gradient(network.float(), wide, far, steps=1, lr=1e37, metric="mse")  # noqa: E731
    refused(call, FloatingPointError, "lower lr")
    network.double()
    assert by_row.columns == {}
    last = dict(zip(dict(network.named_parameters()), target, strict=True))["classifier.weight"]
    only = fit_to_gradient(network, start, {"classifier.weight": last}, steps=2)
    assert not torch.allclose(only.images, by_index.images)


def test_fit_to_gradient_resumes_bitwise_equal() -> None:
    network, start, target = server_case()
    states: list[dict[str, Tensor]] = []
    whole = fit_to_gradient(network, start, target, steps=4, callback=lambda p: states.append(p.state()))
    again = fit_to_gradient(network, start, target, steps=4, resume=states[1])
    assert torch.equal(again.images, whole.images)
    refused(lambda: fit_to_gradient(network, start, target, steps=4, lr=0.5, resume=states[1]), ValueError, r"lr=1\.0")
    with pytest.raises(ValueError, match="other arguments: target="):
        fit_to_gradient(network, start, [-t for t in target], steps=4, resume=states[1])
    with pytest.raises(ValueError, match="other arguments: data="):
        fit_to_gradient(network, start.replace(images=-start.images), target, steps=4, resume=states[1])
    with torch.no_grad():
        next(network.parameters()).mul_(1.01)
    with pytest.raises(ValueError, match="other arguments: network="):
        fit_to_gradient(network, start, target, steps=4, resume=states[1])


def test_fit_to_gradient_refuses_mismatched_targets() -> None:
    network, start, target = server_case()
    refused(lambda: fit_to_gradient(network, start, target[:-1]), ValueError, "for each of the")
    with pytest.raises(ValueError, match="no parameters of the network: mask"):
        fit_to_gradient(network, start, {"mask": target[0]})
    with pytest.raises(ValueError, match=r"must be a tensor \[2\], got \[3\]"):
        fit_to_gradient(network, start, [*target[:-1], torch.zeros(3)])
    with pytest.raises(ValueError, match="must be finite"):
        fit_to_gradient(network, start, [*target[:-1], torch.full((2,), torch.nan)])
    refused(lambda: fit_to_gradient(network, start, {}), ValueError, "target must hold at least one")
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
    heads = 2 if "enable_gqa" in options else 4
    query = torch.randn(*lead, 4, 4, 5, generator=derive(0), dtype=torch.float64)
    key, value = torch.randn(2, *lead, heads, 3, 5, generator=derive(1), dtype=torch.float64)
    expected = F.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
    with _TwiceDifferentiable(query):
        found = F.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
        dropped = F.scaled_dot_product_attention(query, key, value, dropout_p=1.0, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert not dropped.any()
