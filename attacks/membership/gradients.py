"""Membership scores from per-record gradients: the gradient's norm, and the kernel density test of the FedLGD paper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.membership._inputs import finite_scores
from distillkit._utils import check
from distillkit._utils.eval_mode import eval_mode
from distillkit.rng import derive
from distillkit.sets._devices import on_device

_NUMBERS = 1 << 26
"""Largest number of gradient values in memory: 256 MiB in float32."""


@on_device()
def gradient_norm(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    chunk: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return minus the norm of each record's gradient, as a membership score: training records have small gradients.

    Use it for an adversary who has the network itself (white-box access). The gradient is that of the cross-entropy
    with respect to all parameters, in eval mode. For `lira`, use minus the logarithm of the norm, which is more nearly
    Gaussian: `-(-scores).log()`, where `scores` is the result of this function.

    Args:
        network: classifier that returns logits [n, K] for images. Its mode is restored afterwards.
        images: images of the records, float [n, C, H, W], normalized for the network.
        labels: class indices int [n].
        chunk: number of records processed at once; by default as many as fit in 256 MiB of gradients, at most 256. A
            network that `torch.func.vmap` does not support is processed record by record.
        device: device that computes, or "auto"; results return to the device of `network`. Default: nothing moves.

    Returns:
        Scores, float64 [n], at most 0.

    Raises:
        TypeError, ValueError: `network` is not a network or has no parameters, the images or labels are invalid,
            `chunk` is below 1, or a gradient is not finite.

    Paper: Nasr, Shokri and Houmansadr, "Comprehensive privacy analysis of deep learning" (S&P 2019), who show that
    gradients reveal members; their attack learns from whole gradients, whereas this score uses only the norm.
    """
    check.with_values(check.instance(network, nn.Module, "network", "an nn.Module"))
    images = check.batch_of_images(images).detach()
    labels = check.class_labels(labels, len(images), None).to(images.device)
    values = {name: p.detach() for name, p in network.named_parameters()}
    if not values:
        raise ValueError("network must have parameters, got none")
    if chunk is None:
        chunk = min(256, max(1, _NUMBERS // sum(p.numel() for p in values.values())))
    chunk = check.positive_int(chunk, "chunk")
    with eval_mode(network):
        with torch.no_grad():
            logits = network(images[:1])
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise ValueError(f"network must give logits [n, K], got {list(getattr(logits, 'shape', ()))}")
        check.class_labels(labels, None, logits.shape[1])
        parts = [_norms(network, values, x, y) for x, y in zip(images.split(chunk), labels.split(chunk))]
    found = torch.cat(parts)
    if not bool(found.isfinite().all()):
        raise ValueError(
            f"network must have finite gradients, but those of {int((~found.isfinite()).sum())} records are not"
        )
    return -found


def _norms(network: nn.Module, values: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(network, parameters, (image.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    try:
        with sdpa_kernel(SDPBackend.MATH):  # fused kernels have no batching rule
            rows = vmap(grad(loss), (None, 0, 0))(values, images, labels)
    except RuntimeError:  # for example a branch on the input, or a layer without a batching rule
        each = [grad(loss)(values, x, y) for x, y in zip(images, labels)]
        rows = {name: torch.stack([one[name] for one in each]) for name in values}
    return torch.stack([row.reshape(len(row), -1).double().square().sum(1) for row in rows.values()]).sum(0).sqrt()


def gradient_kde(statistic: Tensor, member: Tensor, *, folds: int = 5, seed: int = 0) -> Tensor:
    """Return log-likelihood ratios from two kernel density estimates, the membership test in FedLGD's paper.

    This is a *weak* test, for comparison with that paper only: a ROC curve on the diagonal does not show privacy. The
    test compares all members with all non-members, so the variation between easy and hard records masks the differences
    that `lira` measures for each record. The test also needs the membership of most records, which no attacker knows.

    Two densities of the statistic are estimated with Gaussian kernels (Scott's bandwidth), one for members and one for
    non-members. A record's score is the logarithm of their ratio. The records are split into `folds` parts, and each
    record is scored with densities that were fitted on the other parts. If the densities were fitted and evaluated on
    the same records, as the paper seems to do, even noise would appear to reveal members.

    Args:
        statistic: one value per record, float [n], or d values per record, [n, d]; preferably the logarithm of the
            gradient's norm, `(-gradient_norm(...)).log()`, because `gradient_norm` returns minus the norm.
        member: whether each record is a member, bool [n]; at least two members and two non-members per fold.
        folds: number of parts, at least 2.
        seed: seed of the assignment to parts.

    Returns:
        Log-likelihood ratios, float64 [n], higher for records that look like members.

    Raises:
        TypeError, ValueError: the shapes do not fit, a value is not finite, there are too few records for the folds, or
            the statistic is constant.

    Paper: Huang et al., "Federated Learning on Virtual Heterogeneous Data with Local-Global Dataset Distillation" (TMLR
    2024), section 5.5, "Privacy", and Fig. 6: gradients of the server's model on training and test data, and a Gaussian
    kernel density estimate. The paper calls its test a likelihood-ratio attack after Carlini et al. (2022), but uses no
    shadow models. It does not state the statistic, the bandwidth and the folds, and no code is available, so these are
    our choices.
    """
    values = finite_scores(statistic, "statistic").cpu()
    if values.ndim not in (1, 2) or 0 in values.shape:
        raise ValueError(f"statistic must be [n] or [n, d], got {list(values.shape)}")
    check.bool_tensor(member, "member", "[n]")
    if member.shape != values.shape[:1]:
        raise ValueError(
            f"statistic and member must have one row per record, got {list(values.shape)} and {list(member.shape)}"
        )
    folds, seed = check.positive_int(folds, "folds", least=2), check.positive_int(seed, "seed", least=0)
    member, rows = member.cpu(), values.reshape(len(values), -1)
    least = min(int(member.sum()), int((~member).sum()))
    if least < 2 * folds:
        raise ValueError(
            f"member must have at least {2 * folds} of each for {folds} folds, but one side has {least}; use fewer"
        )
    part, generator = torch.zeros(len(rows), dtype=torch.int64), derive(seed, "kde")
    for side in (member, ~member):
        part[side] = torch.arange(int(side.sum()))[torch.randperm(int(side.sum()), generator=generator)] % folds
    scores = torch.zeros(len(rows), dtype=torch.float64)
    for fold in range(folds):
        rest = part != fold
        scores[~rest] = _density(rows[rest & member], rows[~rest]) - _density(rows[rest & ~member], rows[~rest])
    return scores


def _density(known: Tensor, at: Tensor) -> Tensor:
    from scipy.stats import gaussian_kde

    try:
        found: Any = gaussian_kde(known.numpy().T).logpdf(at.numpy().T)
    except ValueError as error:  # includes NumPy's LinAlgError for a singular covariance
        raise ValueError(
            f"statistic must vary independently in each of its {known.shape[1]} columns, with more rows than "
            "columns in every fold; drop constant columns, or use a norm"
        ) from error
    return torch.from_numpy(found)
