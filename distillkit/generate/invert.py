"""Images that a trained network takes for given labels, by optimising its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.progress import Bar, bar
from distillkit._utils.provenance import provenance
from distillkit.chunking import chunk_size
from distillkit.generate._objective import Divergence, Objective, judge
from distillkit.losses import BatchNormPrior
from distillkit.networks._factory import NetworkFactory, build
from distillkit.normalization import IDENTITY, Normalization
from distillkit.rng import as_generator
from distillkit.sets import LabeledImages

__all__ = ["invert"]

_COUPLED_BATCH = 256


def invert(
    teacher: nn.Module,
    targets: Tensor,
    *,
    shape: Sequence[int],
    student: nn.Module | None = None,
    steps: int = 100,
    lr: float = 0.01,
    betas: tuple[float, float] = (0.5, 0.9),
    cross_entropy: float = 1.0,
    total_variation: float = 0.0,
    image_l2: float = 0.0,
    batch_norm: float = 0.0,
    first_bn_multiplier: float = 10.0,
    disagreement: float = 0.1,
    divergence: Divergence = "clamped",
    decoder: NetworkFactory | None = None,
    latent: int = 256,
    normalization: Normalization = IDENTITY,
    batch: int | None = None,
    generator: int | torch.Generator = 0,
    progress: bool = True,
) -> LabeledImages:
    """Make images that a trained network takes for given labels: a distilled set from a model alone, without its data.

    Inputs are optimised from noise until `teacher` gives them the `targets` and, if there is one, `student` does not.

    For each image x with target y, and weights named as the arguments, Adam minimises

        cross_entropy * CE(teacher(x), y) + disagreement * (1 - D(student(x), teacher(x)))
        + total_variation * TV(x) + image_l2 * |x|_2 + batch_norm * BN(batch)

    Args:
        teacher: logits [B, K] of images [B, C, H, W]; used in eval mode, as a copy, and left untouched.
        targets: class indices int [N]; or rows float [N, K] in [0, 1] for a multi-label task, with binary cross-entropy
            (mean over labels) and D of each label's two-way distribution (mean over labels).
        shape: (C, H, W) of an image.
        student: the network to disagree with (FedCOG: the client's previous local model); also a copy. Without one
            the term is left out.
        steps: of Adam. The paper of FedCOG has 100 (Table 10: more is no better); its code has 500.
        lr: of Adam, in units of the normalised space.
        betas: of Adam.
        cross_entropy, total_variation, image_l2, batch_norm, disagreement: weights, at least 0. The defaults are
            FedCOG's; DeepInversion turns the others on. TV and the norm are those of `losses`, for each image.
        first_bn_multiplier: extra weight of the first BatchNorm layer's statistics.
        divergence: D: "clamped" as released by DeepInversion and FedCOG, or the true "jensen_shannon", whose gradient
            does not vanish where the networks disagree most (see `losses.clamped_disagreement`).
        decoder: makes a generator network, latents [B, latent] -> pixels [B, C, H, W] in [0, 1], for example
            `lambda: SmallDecoder(shape)`; it is drawn anew for each batch and trained together with its latents.
            Default: the pixels themselves are the parameters.
        latent: length of the decoder's latent vectors.
        normalization: of the space that the networks expect.
        batch: images that are optimised together; it bounds the memory. Default: 256 if they share something
            (BatchNorm statistics, a decoder); else what suits the device, since then it changes no result.
        generator: draws the initial images, N(0, 1) in the normalised space, or the latents and the decoder.
        progress: whether long work shows a bar (see `distillkit._utils.progress`).

    Returns:
        A set on the teacher's device, labelled with the targets. Each image is the best iterate of that image (its own
        loss, the first to the last), a copy; the column `"logits"` holds the teacher's logits of these very images.
        Images are not confined to pixels in [0, 1], unless a decoder makes them. In `info`: `target_accuracy`, the
        share of images (of labels) that the teacher takes for their target, and the mean `loss`.

    Raises:
        TypeError, ValueError: what is wrong with which argument; a network without BatchNorm for `batch_norm`;
            an image whose loss was never finite.

    Papers: DeepInversion (Yin et al., "Dreaming to Distill", CVPR 2020), Eq. 2-4 and 8-9; FedCOG (Ye et al., ICLR
    2024), section 4.1, with `student` and the labels of `complement_targets`.

    Deviations: the released codes alias their "best" images with the optimiser's, so they return the last ones, FedCOG
    with the logits of others; the losses are those of single images, so a batch of another size gives the same
    images (up to rounding), where the releases norm and clamp over the batch; FedCOG's generator emits pixels in [0, 1]
    to networks that expect normalised images, here they are encoded; no hook stays behind on the teacher.
    """
    steps = check.positive_int(steps, "steps", least=0)
    lr = check.real_number(lr, "lr", above=0.0)
    first_bn_multiplier = check.real_number(first_bn_multiplier, "first_bn_multiplier", least=0.0)
    latent = check.positive_int(latent, "latent")
    shape = tuple(check.positive_int(s, "shape") for s in check.sequence(shape, "shape", "numbers (C, H, W)", 3))
    first, second = check.sequence(betas, "betas", "numbers in [0, 1)", 2)
    betas = tuple(check.real_number(b, "betas", least=0.0, below=1.0) for b in (first, second))  # type: ignore[assignment]
    given, generator = generator, as_generator(generator)
    objective = Objective(
        teacher=judge(teacher, "teacher"),
        student=None if student is None else judge(student, "student"),
        cross_entropy=cross_entropy,
        total_variation=total_variation,
        image_l2=image_l2,
        batch_norm=batch_norm,
        disagreement=disagreement,
        divergence=divergence,
    )
    like = next(objective.teacher.parameters(), torch.empty(0)).detach()
    num_classes = objective.num_classes(like.new_zeros(1, *shape))
    targets = _checked_targets(targets, num_classes)
    targets = targets.to(like if targets.is_floating_point() else like.device)

    n = len(targets)
    start = torch.randn(n, *(shape if decoder is None else (latent,)), generator=generator).to(like)
    if batch is not None:
        batch = check.positive_int(batch, "batch")
    elif objective.couples or decoder is not None:
        batch = _COUPLED_BATCH
    images, logits = like.new_empty(n, *shape), like.new_empty(n, num_classes)
    total = 0.0
    with ExitStack() as stack:
        if batch_norm:
            prior = BatchNormPrior(objective.teacher, first_multiplier=first_bn_multiplier)
            objective.prior = stack.enter_context(prior)
        size = chunk_size(images, batch)
        shown = stack.enter_context(bar(-(-n // size) * (steps + 1), "invert", progress=progress))
        for first in range(0, n, size):
            piece = slice(first, first + size)
            free, draw = _free_parameters(start[piece], decoder, normalization, generator)
            best, loss = _best_iterates(objective, targets[piece], free, draw, steps, lr, betas, shown)
            if best.shape[1:] != shape:
                raise ValueError(f"decoder must give images of shape={shape}, got {tuple(best.shape[1:])}")
            images[piece], total = best, total + loss
            with torch.no_grad():
                logits[piece] = objective.teacher(best)

    right = logits.argmax(1) == targets if targets.ndim == 1 else (logits > 0) == (targets > 0.5)
    info = {"method": "invert", "steps": steps, **provenance(given)}
    if n:
        info |= {"target_accuracy": float(right.double().mean()), "loss": total / n}
    return LabeledImages(
        images,
        targets,
        num_classes=num_classes,
        normalization=normalization,
        columns={"logits": logits},
        info=info,
    )


def _checked_targets(targets: Tensor, num_classes: int) -> Tensor:
    if not isinstance(targets, Tensor) or not targets.is_floating_point():
        return check.class_labels(targets, None, num_classes, "targets")
    if targets.ndim != 2 or targets.shape[1] != num_classes:
        raise ValueError(f"targets must be rows [N, {num_classes}], got shape {list(targets.shape)}")
    if not bool(((targets >= 0) & (targets <= 1)).all()):
        low, high = (float(v) for v in targets.aminmax())
        raise ValueError(f"targets must be rows of numbers in [0, 1], got {low:.4g} to {high:.4g}")
    return targets


def _free_parameters(
    start: Tensor, decoder: NetworkFactory | None, normalization: Normalization, generator: torch.Generator
) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """What Adam changes, and the images as a function of it."""
    start = start.clone().requires_grad_()
    if decoder is None:
        return [start], lambda: start
    network = build(decoder, generator).to(start).train()
    return [start, *network.parameters()], lambda: normalization.encode(network(start))


def _best_iterates(
    objective: Objective,
    targets: Tensor,
    free: list[Tensor],
    draw: Callable[[], Tensor],
    steps: int,
    lr: float,
    betas: tuple[float, float],
    shown: Bar,
) -> tuple[Tensor, float]:
    """Each image's iterate of the smallest loss, and the sum of these losses."""
    adam = torch.optim.Adam(free, lr=lr, betas=betas)
    best = draw().detach()
    least = best.new_full((len(best),), torch.inf)
    for step in range(steps + 1):
        images = draw()
        values = objective(images, targets)
        better = values.detach() < least
        best = torch.where(better.view(-1, 1, 1, 1), images.detach(), best)
        least = torch.where(better, values.detach(), least)
        if step < steps:
            adam.zero_grad()
            values.sum().backward()
            adam.step()
        shown.update()
    lost = int((~torch.isfinite(least)).sum())
    if lost:
        raise ValueError(f"the loss of {lost} of {len(least)} images was never finite; are the teacher's weights?")
    return best, float(least.sum())
