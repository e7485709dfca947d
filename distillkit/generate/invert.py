"""Inversion of a trained network: optimization of images for which the network predicts given labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit._utils.batches import batch_indices, require_batch_statistics, uses_batch_statistics
from distillkit._utils.eval_mode import eval_mode
from distillkit._utils.progress import Bar, bar
from distillkit._utils.provenance import provenance
from distillkit.chunking import chunk_size
from distillkit.generate._inversion_loss import Divergence, InversionLoss, frozen_eval_copy
from distillkit.generate.decoder import LatentDecoder
from distillkit.losses import BatchNormPrior
from distillkit.networks._factory import build
from distillkit.normalization import IDENTITY, Normalization
from distillkit.rng import as_generator
from distillkit.sets import LabeledImages, TiledImages, Tiles
from distillkit.sets._devices import on_device

_COUPLED_BATCH = 256


@on_device()
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
    parametrize: Tiles | LatentDecoder | None = None,
    normalization: Normalization = IDENTITY,
    batch: int | None = None,
    generator: int | torch.Generator = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> LabeledImages:
    """Create images without data by optimizing noise until a trained network predicts the given labels.

    Use this function to distill a model whose training data is gone, or to balance a client's classes. If a `student`
    is given, the images must also make teacher and student disagree.

    For each image x with target y, Adam minimizes the loss below. D is the `divergence` between the predictions of the
    two networks. BN compares the statistics of the batch with those stored in the teacher's BatchNorm layers. The
    weights of the terms are arguments.

        cross_entropy * CE(teacher(x), y) + disagreement * (1 - D(student(x), teacher(x)))
        + total_variation * TV(x) + image_l2 * |x|_2 + batch_norm * BN(batch)

    Args:
        teacher: network that maps images [B, C, H, W] to logits [B, K]. A copy in eval mode is used.
        targets: class indices int [N] or, for a multi-label task, rows float [N, K] in [0, 1]. In a multi-label task,
            CE is the binary cross-entropy. D is computed for the binary distribution of each label, and averaged over
            the labels.
        shape: shape (C, H, W) of an image.
        student: network that should disagree with the teacher. In FedCOG, it is the client's previous local model. A
            copy in eval mode is used. None omits the disagreement term.
        steps: number of Adam steps. FedCOG's paper uses 100, because more steps do not help (Table 10); its code uses
            500.
        lr: learning rate of Adam. Without a `LatentDecoder`, it is roughly the change of a normalized pixel per step.
        betas: betas of Adam.
        cross_entropy, total_variation, image_l2, batch_norm, disagreement: weights of the terms, at least 0. The
            defaults are those of FedCOG. DeepInversion also uses the terms whose default is 0. TV and the norm |x|_2
            are computed for each image, as in `losses`.
        first_bn_multiplier: factor by which the term of the first BatchNorm layer is multiplied.
        divergence: the divergence D. "clamped" is the form in the code of DeepInversion and FedCOG (see
            `losses.clamped_disagreement`), whose gradient is zero where the networks disagree most. "jensen_shannon" is
            the Jensen-Shannon divergence, whose gradient is not zero there.
        parametrize: parametrization of the images. Default: the pixels are optimized. With `sets.Tiles(2)`, one stored
            image per target is optimized. It is decoded to 4 images with this target, and the result is a
            `TiledImages`. With a `LatentDecoder`, the latents and weights of a generator network are optimized.
        normalization: normalization that the networks expect.
        batch: number of images, after decoding, that are optimized together. A smaller number needs less memory. The
            default is 256 if the images of a batch share BatchNorm statistics or the generator network of a
            `LatentDecoder`. They share BatchNorm statistics if `batch_norm` is above 0, or if a network normalizes by
            the statistics of the batch. Otherwise the default depends on the device, and does not affect the result.
        generator: seed or random generator. It is used to draw the initial images from N(0, 1) in the normalized space
            or, with a `LatentDecoder`, the latents and the weights of the generator network.
        device: device that computes, or "auto"; results return to the device of `teacher`. Default: nothing moves.
        progress: whether to show a progress bar.

    Returns:
        A set on the teacher's device, labeled with the targets. For each image, the Adam iterate with the lowest loss
        is returned. (With `Tiles`, this applies to each stored image.) The column `"logits"` contains the teacher's
        logits for each image. Without a `LatentDecoder`, pixels may be outside [0, 1]. The `info` of the set contains
        the mean `loss` and `target_accuracy`, the share of images for which the teacher predicts the target. For
        multi-label targets, `target_accuracy` is the share of labels that the teacher predicts correctly.

    Raises:
        TypeError, ValueError: an argument is invalid, `batch_norm` is set for a network without BatchNorm, or the loss
            of an image was never finite.

    Papers: DeepInversion (Yin et al., "Dreaming to Distill", CVPR 2020), Eq. 2-4 and 8-9; FedCOG (Ye et al., ICLR
    2024), section 4.1, with `student` and the labels of `generate.complement_targets`.

    Deviations: FedCOG's code returns the images of the last step, together with logits of an earlier step; here, the
    best images and their logits are returned. The code of both papers computes norms (as in TV) and the clamp of D over
    the whole batch. Here each image has its own loss, so the batch size changes images only by rounding errors, unless
    the images of a batch share BatchNorm statistics or a generator network. FedCOG passes the generator's pixels to
    networks without normalization, although the networks expect normalized images; here the pixels are normalized
    first.
    """
    steps = check.positive_int(steps, "steps", least=0)
    lr = check.learning_rate(lr)
    first_bn_multiplier = check.real_number(first_bn_multiplier, "first_bn_multiplier", least=0.0)
    tiles = _check_parametrization(parametrize)
    shape = tuple(check.positive_int(s, "shape") for s in check.sequence(shape, "shape", "numbers (C, H, W)", 3))
    tiles.require_shape(shape)
    first, second = check.sequence(betas, "betas", "numbers in [0, 1)", 2)
    betas = tuple(check.real_number(b, "betas", least=0.0, below=1.0) for b in (first, second))  # type: ignore[assignment]
    if student is teacher:
        raise ValueError("student must be another network than teacher: with itself, a network never disagrees")
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
    if not any((cross_entropy, total_variation, image_l2, batch_norm, student is not None and disagreement)):
        raise ValueError("cross_entropy or another weight must be positive, got 0 for all: the images would stay noise")
    like = next(objective.teacher.parameters(), torch.empty(0)).detach()
    num_classes = objective.count_logits(torch.linspace(-1, 1, 2 * math.prod(shape)).view(2, *shape).to(like))
    targets = _check_targets(targets, num_classes)
    targets = targets.to(like if targets.is_floating_point() else like.device)

    n, latent = len(targets), parametrize.latent if isinstance(parametrize, LatentDecoder) else None
    start = torch.randn(n, *(shape if latent is None else (latent,)), generator=generator).to(like)
    if batch is not None:
        batch = check.positive_int(batch, "batch")
    elif objective.depends_on_batch or latent is not None:
        batch = _COUPLED_BATCH
    stored, logits = like.new_empty(n, *shape), like.new_empty(n * tiles.count, num_classes)
    labels, total = targets.repeat_interleave(tiles.count, 0), 0.0
    decode = tiles.decode if isinstance(parametrize, Tiles) else lambda images: images
    with ExitStack() as stack:
        if batch_norm:
            prior = BatchNormPrior(objective.teacher, first_multiplier=first_bn_multiplier)
            objective.prior = stack.enter_context(prior)
        size = max(1, chunk_size(stored, batch) // tiles.count)
        networks = {"teacher": objective.teacher, "student": objective.student}
        for name, network in networks.items():
            require_batch_statistics(network, stored, min(size, n) * tiles.count, name)
        coupled = latent is not None or any(map(uses_batch_statistics, networks.values()))
        rows = batch_indices(torch.arange(n), size, merge_single=coupled and tiles.count == 1) if n else []
        shown = stack.enter_context(bar(len(rows) * (steps + 1), "invert", progress=progress))
        for some in rows:
            piece = slice(int(some[0]), int(some[-1]) + 1)
            decoded = slice(piece.start * tiles.count, piece.stop * tiles.count)
            free, draw = _trainable_parameters(start[piece], parametrize, shape, normalization, generator)
            best, loss = _best_iterates(objective, labels[decoded], free, draw, decode, steps, lr, betas, shown)
            stored[piece], total = best, total + loss
            with torch.no_grad():
                logits[decoded] = objective.teacher(decode(best))

    right = logits.argmax(1) == labels if labels.ndim == 1 else (logits > 0) == (labels > 0.5)
    info = {"method": "invert", "derived": "invert", "steps": steps, **provenance(given)}
    if n:
        info |= {"target_accuracy": float(right.double().mean()), "loss": total / len(labels)}
    facts: dict[str, Any] = {"num_classes": num_classes, "normalization": normalization, "columns": {"logits": logits}}
    if isinstance(parametrize, Tiles) and n:
        return TiledImages(stored, labels, tiles=parametrize, info={**info, "parametrize": repr(tiles)}, **facts)
    return LabeledImages(stored, labels, info=info, **facts)


def _check_parametrization(parametrize: Tiles | LatentDecoder | None) -> Tiles:
    if parametrize is not None and not isinstance(parametrize, Tiles | LatentDecoder):
        raise TypeError(
            "parametrize must be a Tiles, such as Tiles(2), a LatentDecoder(lambda: SmallDecoder(shape)), or None, got "
            f"{parametrize!r}"
        )
    return parametrize if isinstance(parametrize, Tiles) else Tiles(1)


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
    start: Tensor,
    parametrize: Tiles | LatentDecoder | None,
    shape: tuple[int, ...],
    normalization: Normalization,
    generator: torch.Generator,
) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Return the tensors that Adam optimizes, and a function that computes the images from these tensors."""
    start = start.clone().requires_grad_()
    if not isinstance(parametrize, LatentDecoder):
        return [start], lambda: start
    network = build(parametrize.factory, generator).to(start).train()
    require_batch_statistics(network, start, len(start), "parametrize")
    try:
        with torch.no_grad(), eval_mode(network):
            made = network(start)
    except (TypeError, RuntimeError) as error:
        first = str(error).split("\n")[0]
        raise ValueError(f"parametrize must take latents {list(start.shape)}: {first}") from error
    if not isinstance(made, Tensor) or made.shape != (len(start), *shape):
        came = tuple(made.shape[1:]) if isinstance(made, Tensor) else type(made).__name__
        raise ValueError(f"parametrize must give images of shape={shape}, got {came}")
    return [start, *network.parameters()], lambda: normalization.encode(network(start))


def _best_iterates(
    objective: InversionLoss,
    targets: Tensor,
    free: list[Tensor],
    draw: Callable[[], Tensor],
    decode: Callable[[Tensor], Tensor],
    steps: int,
    lr: float,
    betas: tuple[float, float],
    shown: Bar,
) -> tuple[Tensor, float]:
    """Minimize the loss of a batch of images with Adam. For each image, return the iterate that has the lowest loss.

    With `Tiles`, each stored image is decoded to several images. The loss of a stored image is the sum of the losses of
    its decoded images. Without `Tiles`, each stored image is its own decoded image.
    """
    adam = torch.optim.Adam(free, lr=lr, betas=betas)
    best = draw().detach()
    least = best.new_full((len(best),), torch.inf)
    for step in range(steps + 1):
        images = draw()
        values = objective(decode(images), targets).unflatten(0, (len(images), -1)).sum(1)
        better = values.detach() < least
        best = torch.where(better.view(-1, 1, 1, 1), images.detach(), best)
        least = torch.where(better, values.detach(), least)
        if step < steps:
            adam.zero_grad()
            check.differentiable(values, "teacher", "its images").sum().backward()
            adam.step()
        shown.update()
    if failed := int((~torch.isfinite(least)).sum()):
        raise ValueError(f"the loss of {failed} of {len(least)} images was never finite; check the teacher's weights")
    return best, float(least.sum())
