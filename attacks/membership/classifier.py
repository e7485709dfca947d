"""Membership inference by a classifier that is trained on the outputs of shadow models (Shokri et al.)."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.membership._inputs import finite_scores
from distillkit._utils import check


def shadow_classifier(target: Tensor, inside: Tensor, shadows: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return the scores of a classifier that distinguishes members from non-members by a model's outputs.

    This is the attack of Shokri et al. For every class, a logistic regression is trained to separate the outputs of the
    shadow models on their training records from their outputs on other records. It then scores the target's outputs.
    The attack uses one decision rule for all records of a class. It is therefore a baseline for `lira`, which fits a
    separate rule to each record. The shadow models must not include the target itself. They must not include the
    target's complement either, the model that was trained on exactly the records that the target was not trained on.
    Otherwise the training data of the attack would depend on the target. `leave_one_out` excludes both models.

    Paper: Shokri et al., "Membership inference attacks against machine learning models" (S&P 2017). Deviations: we use
    logistic regression (scikit-learn, on standardized outputs, with its default penalty) in place of a network; logits
    or other scores in place of probabilities, which confident models round to 1; and shadow models trained on halves of
    the target's candidate records in place of other records.

    Args:
        target: outputs of the target model, float [n] or [n, d]; for example logits (`model_scorer(network, None)`).
        inside: whether shadow model s was trained on record i, bool [S, n].
        shadows: outputs of the shadow models, [S, n] or [S, n, d].
        labels: class indices of the records, int [n]; None trains one classifier for all classes.

    Returns:
        Log odds of membership, float64 [n], higher for members.

    Raises:
        TypeError, ValueError: the tensors' shapes do not match, a score is not finite, or the shadows were trained on
            all records of a class or on none.
    """
    target, shadows = finite_scores(target, "target"), finite_scores(shadows, "shadows").to(target.device)
    check.bool_tensor(inside, "inside", "[S, n]")
    if target.ndim not in (1, 2) or 0 in target.shape or shadows.ndim != target.ndim + 1:
        raise ValueError(
            f"target must be [n] or [n, d] and shadows [S, n] or [S, n, d], got {list(target.shape)} and "
            f"{list(shadows.shape)}"
        )
    if shadows.shape[1:] != target.shape or inside.shape != shadows.shape[:2]:
        raise ValueError(
            f"inside and shadows must have one row of target's {list(target.shape)} per shadow, got "
            f"{list(inside.shape)} and {list(shadows.shape)}"
        )
    labels = torch.zeros(len(target), dtype=torch.int64) if labels is None else labels
    labels = check.class_labels(labels, len(target), None).to(target.device)
    rows, outputs = target.reshape(len(target), -1), shadows.reshape(*shadows.shape[:2], -1)
    inside = inside.to(target.device)
    found = torch.zeros(len(target), dtype=torch.float64, device=target.device)
    for label in labels.unique().tolist():
        own = labels == label
        found[own] = _odds(label, outputs[:, own].flatten(0, 1), inside[:, own].flatten(), rows[own])
    return found


def _odds(label: int, known: Tensor, member: Tensor, rows: Tensor) -> Tensor:
    from sklearn.linear_model import LogisticRegression

    if bool(member.all()) or not bool(member.any()):
        raise ValueError(
            f"inside must have members and non-members of every class, but the shadows were trained on "
            f"{'every' if bool(member.all()) else 'no'} record of class {label}; train more shadows on random halves"
        )
    mean, spread = known.mean(0), known.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    model = LogisticRegression(max_iter=1000).fit(((known - mean) / spread).cpu().numpy(), member.cpu().numpy())
    return torch.from_numpy(model.decision_function(((rows - mean) / spread).cpu().numpy())).to(rows)
