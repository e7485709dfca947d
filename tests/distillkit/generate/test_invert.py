from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from distillkit._utils.provenance import provenance
from distillkit.chunking import chunk_size
from distillkit.generate.complement import complement_targets
from distillkit.generate.decoder import LatentDecoder, SmallDecoder
from distillkit.generate.invert import invert
from distillkit.networks import build
from distillkit.normalization import Normalization
from distillkit.rng import as_generator
from distillkit.sets import LabeledImages, TiledImages, Tiles
from tests.refused import refused

SHAPE = (3, 8, 6)


class Small(nn.Module):
    def __init__(self, channels: int = 3, classes: int = 4, norm: bool = True, stored: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6, track_running_stats=stored) if norm else nn.Identity()
        self.head = nn.Linear(6, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(images)).relu().mean((2, 3)) * 8)


def net(seed: int, **options: Any) -> nn.Module:
    model = build(lambda: Small(**options), seed)
    if isinstance(model.norm, nn.BatchNorm2d) and model.norm.running_mean is not None:
        model.norm.running_mean.uniform_(-1, 1, generator=as_generator(seed))
        model.norm.running_var.uniform_(0.5, 2, generator=as_generator(seed))
    return model


TEACHER, STUDENT = net(0), net(1)
LINEAR = lambda: nn.Linear(9, 4)  # noqa: E731
TARGETS = torch.tensor([0, 3, 1, 1, 2])


def inverted(**options: Any) -> LabeledImages:
    return invert(**{"teacher": TEACHER, "targets": TARGETS, "shape": SHAPE, **options})


def latent(length: int, width: int) -> LatentDecoder:
    return LatentDecoder(lambda: SmallDecoder(SHAPE, length, width), length)


def by_hand(start: Tensor, target: Tensor, steps: int, lr: float, jensen_shannon: bool) -> tuple[Tensor, float, int]:
    """Invert one image by the formulas, with Adam written out, and return the best iterate."""
    teacher, student = TEACHER.double().eval(), STUDENT.double().eval()
    x, m, v = start.double().clone(), 0.0, 0.0
    best: tuple[float, Tensor, int] = (math.inf, x, -1)
    for step in range(steps + 1):
        x = x.detach().requires_grad_()
        z, s = teacher(x[None])[0], student(x[None])[0]
        p, q = s.softmax(0), z.softmax(0)
        if jensen_shannon:
            middle = (p + q) / 2
            d = sum((a * (a / middle).log()).sum() / 2 for a in (p, q))
        else:
            middle = ((p + q) / 2).clamp(0.01, 0.99)
            d = sum((middle * (middle / a.clamp(0.01, 0.99)).log()).sum() / 2 for a in (p, q)).clamp(0, 1)
        variation = (x[:, :, 1:] - x[:, :, :-1]).abs().sum() + (x[:, 1:] - x[:, :-1]).abs().sum()
        loss = -2 * z.log_softmax(0)[target] + 0.5 * (1 - d) + 0.003 * variation + 0.1 * x.square().sum().sqrt()
        if loss.item() < best[0]:
            best = (loss.item(), x.detach().clone(), step)
        (g,) = torch.autograd.grad(loss, x)
        m, v = 0.5 * m + 0.5 * g, 0.9 * v + 0.1 * g**2
        change = (m / (1 - 0.5 ** (step + 1))) / ((v / (1 - 0.9 ** (step + 1))).sqrt() + 1e-8)
        x = x.detach() - lr * change
    TEACHER.float(), STUDENT.float()
    return best[1], best[0], best[2]


@pytest.mark.parametrize("divergence", ["clamped", "jensen_shannon"])
def test_adam_on_the_formula_and_the_best_iterate_of_each_image(divergence: Any) -> None:
    lr, steps = 0.4, 12
    start = torch.randn(5, *SHAPE, generator=as_generator(2))
    wanted = [by_hand(x, y, steps, lr, divergence == "jensen_shannon") for x, y in zip(start, TARGETS, strict=True)]
    weights = {"cross_entropy": 2.0, "disagreement": 0.5, "total_variation": 0.003, "image_l2": 0.1}
    teacher, student = net(0).double(), net(1).double()
    options = {"teacher": teacher, "student": student, "steps": steps, "lr": lr, "divergence": divergence}
    made = inverted(**options, generator=2, **weights)
    assert made.images.dtype == torch.float64
    assert torch.allclose(made.images, torch.stack([w[0] for w in wanted]), atol=1e-9)
    right = float((made.columns["logits"].argmax(1) == TARGETS).double().mean())
    assert made.info == {
        "method": "invert", "derived": "invert", "steps": steps, "target_accuracy": right, **provenance(2),
        "device": "cpu", "loss": pytest.approx(sum(w[1] for w in wanted) / 5),
    }  # fmt: skip
    assert len({w[2] for w in wanted}) > 1, "the case is worth something only if images are best at different steps"
    assert any(w[2] < steps for w in wanted)


def test_the_best_images_are_copies_and_their_logits_are_the_teachers() -> None:
    """Released code returns the last images with the logits of others."""
    made = inverted(student=STUDENT, steps=15, lr=0.5)
    assert torch.allclose(made.columns["logits"], TEACHER.eval()(made.images), atol=1e-5)
    longer = [inverted(student=STUDENT, steps=s, lr=0.5).info["loss"] for s in range(6)]
    assert longer == sorted(longer, reverse=True), "more steps never lose a better image"


@given(st.integers(1, 5))
def test_the_batch_size_does_not_change_the_result(batch: int) -> None:
    whole, parts = (inverted(student=STUDENT, steps=4, total_variation=0.01, batch=b) for b in (5, batch))
    assert torch.allclose(whole.images, parts.images, atol=1e-5)
    assert parts.info["loss"] == pytest.approx(whole.info["loss"], rel=1e-5)


def test_equal_seeds_give_equal_bits_and_a_generator_is_advanced(global_rng_untouched: None) -> None:
    generator = as_generator(5)
    runs = [
        inverted(steps=2, parametrize=decoder, generator=g)
        for decoder in (None, latent(8, 4))
        for g in (5, 5, generator, generator)
    ]
    for a, b, c, d in (runs[:4], runs[4:]):
        assert torch.equal(a.images, b.images)
        assert not torch.equal(c.images, d.images)
    assert torch.equal(runs[0].images, runs[2].images)


def statistics_gap(images: Tensor) -> Tensor:
    inputs = TEACHER.conv(images)
    norm = TEACHER.norm
    mean = inputs.mean((0, 2, 3)) - norm.running_mean
    var = inputs.var((0, 2, 3), correction=0) - norm.running_var
    return (mean.norm() + var.norm()).detach()


def test_the_batchnorm_prior_pulls_towards_the_stored_statistics() -> None:
    def made(weight: float, multiplier: float = 10.0) -> Any:
        return inverted(steps=160, lr=0.05, batch_norm=weight, first_bn_multiplier=multiplier)

    assert statistics_gap(made(1.0).images) < 0.3 * statistics_gap(made(0.0).images)
    assert torch.equal(made(10.0, 1.0).images, made(1.0, 10.0).images), "the only layer is the first"
    assert not torch.allclose(made(1.0, 1.0).images, made(1.0).images)
    none, one, three = (inverted(steps=0, batch_norm=weight).info["loss"] for weight in (0.0, 1.0, 3.0))
    assert three - none == pytest.approx(3 * (one - none))


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    grads = [(p.requires_grad, None if p.grad is None else p.grad.tolist()) for p in model.parameters()]
    return hooks, modes, grads, {k: v.tolist() for k, v in model.state_dict().items()}


def test_the_networks_are_unchanged_even_after_an_exception() -> None:
    teacher, student = net(3).train(), net(4).eval()
    teacher.head.bias.requires_grad_(False)
    teacher(torch.ones(2, *SHAPE)).sum().backward()
    before = snapshot(teacher), snapshot(student)
    inverted(teacher=teacher, student=student, steps=2, batch_norm=1.0)
    assert (snapshot(teacher), snapshot(student)) == before

    with torch.no_grad():
        teacher.conv.weight[0, 0, 0, 0] = torch.nan
    hooks = snapshot(teacher)[:2]
    with pytest.raises(ValueError, match="the loss of 5 of 5 images was never finite"):
        inverted(teacher=teacher, steps=2, batch_norm=1.0)
    assert snapshot(teacher)[:2] == hooks


def test_multi_label_rows() -> None:
    rows = torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1]])
    made = invert(TEACHER, rows, shape=SHAPE, steps=0, student=STUDENT, divergence="jensen_shannon")
    p, q = STUDENT.eval()(made.images).sigmoid().double(), copy.deepcopy(TEACHER).eval()(made.images).sigmoid().double()

    def entropy(x: Tensor) -> Tensor:
        return -(x * x.log() + (1 - x) * (1 - x).log())

    apart = (entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2).mean()
    wanted = nn.functional.binary_cross_entropy(q, rows.double()) + 0.1 * (1 - apart)
    assert made.info["loss"] == pytest.approx(float(wanted.detach()), rel=1e-4)
    assert made.info["target_accuracy"] == pytest.approx(float(((q > 0.5) == (rows > 0.5)).double().mean()))

    made = invert(net(4), rows, shape=SHAPE, steps=80, lr=0.1)
    assert made.info["target_accuracy"] > 0.9
    assert torch.equal(made.labels, rows)
    assert made.labels.dtype == torch.float32


def test_a_decoder_gives_pixels_in_the_given_normalization() -> None:
    half = Normalization((0.5,) * 3, (0.25,) * 3)
    start, made = (inverted(steps=steps, parametrize=latent(16, 8), normalization=half) for steps in (0, 15))
    pixels = half.decode(made.images)
    assert 0 <= float(pixels.min()) < 0.4 < 0.6 < float(pixels.max()) <= 1
    assert made.normalization == half
    assert made.info["loss"] < 0.8 * start.info["loss"]
    whole, merged = (inverted(steps=2, batch=batch, parametrize=latent(8, 4)) for batch in (5, 4))
    assert torch.equal(whole.images, merged.images), "a last batch of one image joins the batch before"


@pytest.mark.parametrize("shape", [(1, 28, 28), (5, 9, 6), (3, 1, 1)])
def test_the_small_decoder_makes_any_shape(shape: tuple[int, int, int]) -> None:
    latents = torch.randn(4, 7, generator=as_generator(0))
    decoder: Any = build(lambda: SmallDecoder(shape, 7, 6), 0)
    pixels = decoder(latents)
    small, half, full = ((-(-shape[1] // k), -(-shape[2] // k)) for k in (4, 2, 1))
    maps = decoder.norm(decoder.start(latents).view(4, 6, *small))
    for size, (conv, norm, *_) in ((half, decoder.middle), (full, decoder.end)):
        maps = nn.functional.leaky_relu(norm(conv(nn.functional.interpolate(maps, size))), 0.2)
    assert torch.allclose(pixels, decoder.end[3](maps).sigmoid())
    assert maps.shape == (4, 3, *full)
    assert pixels.shape == (4, *shape)
    assert float(pixels.min()) > 0
    assert float(pixels.max()) < 1


def test_a_foreign_network_and_other_shapes() -> None:
    resnet = torchvision.models.resnet18(num_classes=2)
    made = invert(resnet, torch.tensor([1, 0]), shape=(3, 64, 64), steps=1, batch_norm=0.1)
    assert made.shape == (3, 64, 64)
    five = invert(net(2, channels=5, classes=2), torch.tensor([1, 0]), shape=(5, 7, 9), steps=2)
    assert five.shape == (5, 7, 9)


def test_batch_statistics_set_the_default_batch() -> None:
    teacher = net(0, stored=False)
    options: dict[str, Any] = {"shape": (3, 64, 64), "steps": 2, "lr": 0.1}
    targets = TARGETS.repeat(2)
    default = invert(teacher, targets, **options)
    assert torch.equal(default.images, invert(teacher, targets, batch=256, **options).images)
    assert not torch.allclose(default.images, invert(teacher, targets, batch=5, **options).images)
    student = {"teacher": net(0), "student": net(1, stored=False), "targets": targets, **options}
    assert torch.equal(invert(**student).images, invert(batch=256, **student).images)
    assert not torch.allclose(invert(**student).images, invert(batch=5, **student).images)
    sizes: list[int] = []
    alone = net(0)
    alone.register_forward_hook(lambda module, given, logits: sizes.append(len(logits)))
    made = invert(alone, targets, **options)
    assert max(sizes) == chunk_size(made.images) < len(targets)


def test_no_targets_give_an_empty_set() -> None:
    made = invert(TEACHER, complement_targets(torch.tensor([4, 4, 4, 4])), shape=SHAPE)
    assert len(made) == 0
    assert made.num_classes == 4
    assert made.columns["logits"].shape == (0, 4)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "student must have the teacher's 4 classes, got 3", {"student": net(0, classes=3)}),
        (ValueError, r"teacher must give logits \[B, K\], got \[2, 3, 8, 6\]", {"teacher": nn.Identity()}),
        (ValueError, r"teacher cannot take images of shape=\(1, 8, 8\)", {"shape": (1, 8, 8)}),
        (ValueError, r"shape must be 3 numbers \(C, H, W\)", {"shape": (8, 8)}),
        (ValueError, "shape must be at least 1", {"shape": (3, 0, 8)}),
        (ValueError, "targets must be below num_classes=4", {"targets": torch.tensor([4])}),
        (ValueError, r"targets must be rows \[N, 4\]", {"targets": torch.rand(2, 3, generator=as_generator(0))}),
        (ValueError, r"numbers in \[0, 1\]", {"targets": torch.full((1, 4), 2.0)}),
        (ValueError, "cross_entropy or another weight must be positive, got 0 for all", {"cross_entropy": 0.0}),
        (ValueError, "betas must be less than 1, got 1", {"betas": (0.5, 1.0)}),
        (ValueError, "first_bn_multiplier must be at least 0", {"first_bn_multiplier": -1.0}),
        (ValueError, r"parametrize must take latents \[5, 8\]: .*mat1", {"parametrize": LatentDecoder(LINEAR, 8)}),
        (TypeError, r"parametrize must be a Tiles, .*, or None, got 2$", {"parametrize": 2}),
        (ValueError, "divisible by 4, got 8x6", {"parametrize": Tiles(4), "targets": TARGETS[:0]}),
        (ValueError, "must have a BatchNorm layer", {"batch_norm": 1.0, "teacher": net(0, norm=False)}),
        (
            ValueError,
            r"parametrize must give images of shape=\(3, 8, 6\)",
            {"parametrize": LatentDecoder(lambda: SmallDecoder((3, 4, 4)))},
        ),
    ],
)
def test_invalid_arguments_are_named(error: type[Exception], match: str, options: dict[str, Any]) -> None:
    refused(lambda: inverted(**{"steps": 1, **options}), error, match)


def test_tiles_are_optimized_as_autograd_through_decoding_does() -> None:
    """The best iterate of each stored image, by the sum of the losses of its four images, written with torch's Adam."""
    tiles, lr, steps, weight = Tiles(2), 1.5, 12, 0.3
    teacher = net(0).double().eval()
    made = inverted(teacher=teacher, steps=steps, lr=lr, total_variation=weight, parametrize=tiles, generator=2)
    stored = torch.randn(5, *SHAPE, generator=as_generator(2)).double().requires_grad_()
    adam = torch.optim.Adam([stored], lr=lr, betas=(0.5, 0.9))
    best: list[tuple[float, int, Tensor]] = [(float("inf"), -1, torch.empty(0))] * 5
    for step in range(steps + 1):
        images = tiles.decode(stored)
        logs = teacher(images).log_softmax(1)[torch.arange(20), TARGETS.repeat_interleave(4)]
        variation = images.diff(dim=2).abs().flatten(1).sum(1) + images.diff(dim=3).abs().flatten(1).sum(1)
        losses = (weight * variation - logs).view(5, 4).sum(1)
        for i, loss in enumerate(losses.tolist()):
            if loss < best[i][0]:
                best[i] = (loss, step, stored[i].detach().clone())
        adam.zero_grad()
        losses.sum().backward()
        adam.step()
    assert isinstance(made, TiledImages)
    assert torch.allclose(made.stored, torch.stack([b[2] for b in best]), atol=1e-9)
    assert made.info["loss"] == pytest.approx(sum(b[0] for b in best) / 20)
    assert len({b[1] for b in best}) > 1, "the case is worth something only if images are best at different steps"
    assert made.info["parametrize"] == "Tiles(factor=2)"
    assert torch.equal(made.labels, TARGETS.repeat_interleave(4))
    assert torch.allclose(made.columns["logits"], teacher(made.images))
    teacher.float()


@pytest.mark.parametrize("batch_norm", [0.0, 1.0])
def test_one_tile_gives_the_bits_of_no_tiles(batch_norm: float) -> None:
    options: dict[str, Any] = {"student": STUDENT, "steps": 4, "batch_norm": batch_norm}
    plain, one = (inverted(parametrize=p, **options) for p in (None, Tiles(1)))
    assert isinstance(one, TiledImages)
    assert torch.equal(plain.images, one.images)
    assert torch.equal(plain.columns["logits"], one.columns["logits"])
    assert {k: v for k, v in one.info.items() if k != "parametrize"} == plain.info


@given(st.integers(1, 20))
def test_tiles_do_not_depend_on_the_batch_size(batch: int) -> None:
    whole, parts = (inverted(student=STUDENT, steps=3, parametrize=Tiles(2), batch=b) for b in (20, batch))
    assert torch.allclose(whole.images, parts.images, atol=1e-5)


def test_tiles_take_rows_of_several_labels_and_no_targets() -> None:
    rows = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    made = invert(TEACHER, rows, shape=SHAPE, steps=1, parametrize=Tiles(2))
    assert torch.equal(made.labels, rows.repeat_interleave(4, 0))
    assert len(invert(TEACHER, TARGETS[:0], shape=SHAPE, steps=1, parametrize=Tiles(2))) == 0


@pytest.mark.parametrize("arguments", [((3, 8), 4, 4), ((3, 8, 0), 4, 4), ((3, 8, 8), 0, 4), ((3, 8, 8), 4, 1)])
def test_the_small_decoder_refuses(arguments: Any) -> None:
    refused(lambda: SmallDecoder(*arguments), ValueError, "(shape|latent|width) must be .*, got (2|0|1)$")
    refused(lambda: LatentDecoder(SmallDecoder, 0), ValueError, "latent must be at least 1, got 0")


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=12), st.integers(1, 400))
def test_complement_targets_are_proportional_to_the_deficit(counts: list[int], total: int) -> None:
    lacking = [max(counts) - n for n in counts]
    down = complement_targets(torch.tensor(counts, dtype=torch.int32), total=total)
    exact = complement_targets(torch.tensor(counts), total=total, rounding="largest_remainder")
    assert down.dtype == exact.dtype == torch.int64
    if not sum(lacking):
        assert len(down) == len(exact) == 0
        return
    share = [total * m / sum(lacking) for m in lacking]
    floors = [total * m // sum(lacking) for m in lacking]
    assert torch.bincount(down, minlength=len(counts)).tolist() == floors
    assert len(exact) == total
    assert all(abs(n - s) < 1 for n, s in zip(torch.bincount(exact, minlength=len(counts)), share, strict=True))
    assert torch.equal(down, down.sort().values)
    assert int((exact == counts.index(max(counts))).sum()) == 0


def test_complement_targets_by_example() -> None:
    assert complement_targets(torch.tensor([10, 7, 9]), total=10).tolist() == [1] * 7 + [2] * 2
    exact = complement_targets(torch.tensor([10, 7, 9]), total=10, rounding="largest_remainder")
    assert exact.tolist() == [1] * 8 + [2] * 2
    refused(lambda: complement_targets(exact[:0]), ValueError, "^counts must have one entry per class, got none$")
    refused(lambda: complement_targets(exact, rounding="up"), ValueError, "^rounding must be one of 'truncate', 'larg")
