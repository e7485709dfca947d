"""Inversion of a trained network: images optimized to match given labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.progress import Bar, bar
from distillkit._utils.provenance import provenance
from distillkit.chunking import chunk_size
from distillkit.generate._inversion_loss import Divergence, InversionLoss, frozen_eval_copy
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
    """Create images without data by optimizing noise until a trained network predicts the given labels.

    Use this function to distill a model whose training data is gone, or to balance a client's classes. If a `student`
    is given, the images must also make teacher and student disagree.

    For each image x with target y, Adam minimizes the following loss. D is the `divergence` of the two networks'
    predictions, and the weights are arguments.

        cross_entropy * CE(teacher(x), y) + disagreement * (1 - D(student(x), teacher(x)))
        + total_variation * TV(x) + image_l2 * |x|_2 + batch_norm * BN(batch)

    Args:
        teacher: network that maps images [B, C, H, W] to logits [B, K]. A copy is used, in eval mode.
        targets: class indices int [N]; or, for a multi-label task, rows float [N, K] in [0, 1]. A multi-label task uses
            binary cross-entropy, and D is computed for each label's binary distribution and averaged over labels.
        shape: shape (C, H, W) of an image.
        student: network that should disagree with the teacher (FedCOG: the client's previous local model). A copy is
            used. None omits the disagreement term.
        steps: number of Adam steps. FedCOG's paper uses 100, because more steps do not help (Table 10); its code uses
            500.
        lr: learning rate of Adam. Without a decoder, its unit is that of normalized pixels.
        betas: betas of Adam.
        cross_entropy, total_variation, image_l2, batch_norm, disagreement: weights of the terms, at least 0. The
            defaults are FedCOG's; DeepInversion also uses the terms that are 0 by default. Total variation and norm are
            computed for each image, as in `losses`.
        first_bn_multiplier: extra weight of the first BatchNorm layer's statistics.
        divergence: the divergence D. "clamped" is the clamped form in the code of DeepInversion and FedCOG.
            "jensen_shannon" is the exact divergence, whose gradient does not vanish where the networks disagree most
            (see `losses.clamped_disagreement`).
        decoder: function that builds a generator network, which maps latents [B, latent] to pixels [B, C, H, W] in [0,
            1]; for example `lambda: SmallDecoder(shape)`. Each batch of images gets a new generator, which is trained
            together with the latents. Default: the pixels themselves are optimized.
        latent: length of the decoder's latent vectors.
        normalization: normalization that the networks expect.
        batch: number of images optimized together; a smaller number needs less memory. Default: 256 if the images share
            BatchNorm statistics or a decoder. Otherwise the default depends on the device and does not affect the
            result.
        generator: seed or random generator. It draws the initial images from N(0, 1) in the normalized space, or the
            latents and the decoder's weights.
        progress: whether to show a progress bar.

    Returns:
        A set on the teacher's device, labeled with the targets. For each image, the set holds the iterate with the
        lowest loss, and the column `"logits"` holds the teacher's logits for that iterate. Without a decoder, pixels
        may lie outside [0, 1]. `info` holds `target_accuracy` and the mean `loss`. `target_accuracy` is the share of
        images (for multi-label targets, of labels) for which the teacher predicts the target.

    Raises:
        TypeError, ValueError: an argument is invalid, `batch_norm` is set for a network without BatchNorm, or the loss
            of an image was never finite.

    Papers: DeepInversion (Yin et al., "Dreaming to Distill", CVPR 2020), Eq. 2-4 and 8-9; FedCOG (Ye et al., ICLR
    2024), section 4.1, with `student` and the labels of `complement_targets`.

    Deviations: The authors' code keeps a reference to the images under optimization instead of a copy of the best ones,
    so it returns the last images; FedCOG pairs these images with earlier logits. Here each image has its own loss, so
    the batch size changes images only by rounding errors, unless they share BatchNorm statistics or a decoder. The
    authors' code computes norms and clamps over the batch. FedCOG's generator passes pixels in [0, 1] to networks that
    expect normalized images; here the pixels are normalized first. The teacher has no additional hooks afterwards.
    """
    steps = check.positive_int(steps, "steps", least=0)
    lr = check.real_number(lr, "lr", above=0.0)
    first_bn_multiplier = check.real_number(first_bn_multiplier, "first_bn_multiplier", least=0.0)
    latent = check.positive_int(latent, "latent")
    shape = tuple(check.positive_int(s, "shape") for s in check.sequence(shape, "shape", "numbers (C, H, W)", 3))
    first, second = check.sequence(betas, "betas", "numbers in [0, 1)", 2)
    betas = tuple(check.real_number(b, "betas", least=0.0, below=1.0) for b in (first, second))  # type: ignore[assignment]
    given, generator = generator, as_generator(generator)
    objective = InversionLoss(
        teacher=frozen_eval_copy(teacher, "teacher"),
        student=None if student is None else frozen_eval_copy(student, "student"),
        cross_entropy=cross_entropy,
        total_variation=total_variation,
        image_l2=image_l2,
        batch_norm=batch_norm,
        disagreement=disagreement,
        divergence=divergence,
    )
    like = next(objective.teacher.parameters(), torch.empty(0)).detach()
    num_classes = objective.count_classes(like.new_zeros(1, *shape))
    targets = _check_targets(targets, num_classes)
    targets = targets.to(like if targets.is_floating_point() else like.device)

    n = len(targets)
    start = torch.randn(n, *(shape if decoder is None else (latent,)), generator=generator).to(like)
    if batch is not None:
        batch = check.positive_int(batch, "batch")
    elif objective.depends_on_batch or decoder is not None:
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
            free, draw = _trainable_parameters(start[piece], decoder, normalization, generator)
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
        images, targets, num_classes=num_classes, normalization=normalization, columns={"logits": logits}, info=info
    )


def _check_targets(targets: Tensor, num_classes: int) -> Tensor:
    if not isinstance(targets, Tensor) or not targets.is_floating_point():
        return check.class_labels(targets, None, num_classes, "targets")
    if targets.ndim != 2 or targets.shape[1] != num_classes:
        raise ValueError(f"targets must be rows [N, {num_classes}], got shape {list(targets.shape)}")
    if not bool(((targets >= 0) & (targets <= 1)).all()):
        low, high = (float(v) for v in targets.aminmax())
        raise ValueError(f"targets must be rows of numbers in [0, 1], got {low:.4g} to {high:.4g}")
    return targets


def _trainable_parameters(
    start: Tensor, decoder: NetworkFactory | None, normalization: Normalization, generator: torch.Generator
) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Return the tensors that Adam optimizes, and a function that computes the images from them."""
    start = start.clone().requires_grad_()
    if decoder is None:
        return [start], lambda: start
    network = build(decoder, generator).to(start).train()
    return [start, *network.parameters()], lambda: normalization.encode(network(start))


def _best_iterates(
    objective: InversionLoss,
    targets: Tensor,
    free: list[Tensor],
    draw: Callable[[], Tensor],
    steps: int,
    lr: float,
    betas: tuple[float, float],
    shown: Bar,
) -> tuple[Tensor, float]:
    """Return the iterate of each image that has the lowest loss, and the sum of these losses over the images."""
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
    if failed := int((~torch.isfinite(least)).sum()):
        raise ValueError(f"the loss of {failed} of {len(least)} images was never finite; check the teacher's weights")
    return best, float(least.sum())
