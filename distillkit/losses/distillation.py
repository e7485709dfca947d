"""Losses of knowledge distillation, and measures of disagreement between two classifiers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils import check
from distillkit.losses._common import Reduction, reduce, require_same_shape

__all__ = [
    "KnowledgeDistillation",
    "binary_distillation",
    "clamped_disagreement",
    "jensen_shannon",
    "knowledge_distillation",
]

_PAIR = ("student_logits", "teacher_logits")


def knowledge_distillation(
    student_logits: Tensor, teacher_logits: Tensor, *, temperature: float = 1.0, reduction: Reduction = "mean"
) -> Tensor:
    """Compute the knowledge distillation loss between a student's and a teacher's predictions.

    The loss is T^2 * KL(softmax(teacher / T) || softmax(student / T)), in nats.

    Args:
        student_logits: logits of the student, float [N, K].
        teacher_logits: logits of the teacher, float [N, K]; they receive gradients unless you detach them.
        temperature: temperature T > 0.
        reduction: "mean" (torch's "batchmean"), "sum" or "none" over the N samples.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: tensors of a wrong kind, different shapes, or options out of range.

    Paper: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015), Section 2. T^2 keeps the
    scale of the gradient when T changes; some code omits the factor (the Keras code of the single-image work).
    """
    require_same_shape(student_logits, teacher_logits, _PAIR, "N, K")
    temperature = check.real_number(temperature, "temperature", above=0)
    student = F.log_softmax(student_logits / temperature, dim=1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=1)
    return reduce(temperature**2 * (teacher.exp() * (teacher - student)).sum(1), reduction)


class KnowledgeDistillation(nn.Module):
    """`nn.Module` version of `knowledge_distillation`, with options in the constructor and logits in the call.

    Args:
        temperature, reduction: see `knowledge_distillation`.
    """

    def __init__(self, *, temperature: float = 1.0, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.temperature = check.real_number(temperature, "temperature", above=0)
        self.reduction: Reduction = check.one_of(reduction, "reduction", ("mean", "sum", "none"))

    def forward(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Compute the loss of a student's logits [N, K] given a teacher's; see `knowledge_distillation`.

        Args:
            student_logits, teacher_logits: logits, float [N, K].
        """
        return knowledge_distillation(
            student_logits, teacher_logits, temperature=self.temperature, reduction=self.reduction
        )


def binary_distillation(
    student_logits: Tensor, teacher_logits: Tensor, *, temperature: float = 1.0, reduction: Reduction = "mean"
) -> Tensor:
    """Compute the knowledge distillation loss for multi-label tasks, where each label is a Bernoulli variable.

    The loss is T^2 * sum_k KL(Bernoulli(sigmoid(t_k / T)) || Bernoulli(sigmoid(s_k / T))). The sum over labels is the
    KL divergence of the joint distribution. The loss is then reduced over samples.

    Args:
        student_logits: logits of the student, float [N, K], one logit per label.
        teacher_logits: logits of the teacher, float [N, K].
        temperature: temperature T > 0.
        reduction: "mean", "sum" or "none" over the N samples.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: as for `knowledge_distillation`.

    Source: Section 2 of Hinton et al., applied to two classes per label. No paper states this form. FedCOG's code has a
    different multi-label form, which passes probabilities to a function of log-probabilities.
    """
    require_same_shape(student_logits, teacher_logits, _PAIR, "N, K")
    temperature = check.real_number(temperature, "temperature", above=0)
    student, teacher = student_logits / temperature, teacher_logits / temperature
    present = teacher.sigmoid() * (F.logsigmoid(teacher) - F.logsigmoid(student))
    absent = (-teacher).sigmoid() * (F.logsigmoid(-teacher) - F.logsigmoid(-student))
    return reduce(temperature**2 * (present + absent).sum(1), reduction)


def jensen_shannon(p_logits: Tensor, q_logits: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Compute the Jensen-Shannon divergence between the softmax distributions of two classifiers, in nats.

    The divergence is 0 if the distributions are equal, and at most ln 2:

        JS(P, Q) = KL(P || M) / 2 + KL(Q || M) / 2 with M = (P + Q) / 2.

    Args:
        p_logits: logits of the first classifier, float [N, K].
        q_logits: logits of the second classifier, float [N, K].
        reduction: "mean", "sum" or "none" over the N samples.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: tensors of a wrong kind, different shapes, or an unknown reduction.

    Paper: Lin, "Divergence Measures Based on the Shannon Entropy" (1991), Section IV, equal weights. DeepInversion and
    FedCOG use this name for `clamped_disagreement`.
    """
    require_same_shape(p_logits, q_logits, ("p_logits", "q_logits"), "N, K")
    log_p, log_q = F.log_softmax(p_logits, dim=1), F.log_softmax(q_logits, dim=1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    divergence = (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(1) / 2
    return reduce(divergence, reduction)


def clamped_disagreement(
    p_logits: Tensor,
    q_logits: Tensor,
    *,
    low: float = 0.01,
    high: float = 0.99,
    clamp_result: bool = True,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the disagreement of two classifiers as in the authors' code of DeepInversion and FedCOG.

    KL(M || P) / 2 + KL(M || Q) / 2 with M = (P + Q) / 2, where P, Q and M are each clamped to [low, high] without
    renormalization, and the result is clamped to [0, 1]. The competition term of an inversion is 1 minus this value.

    This is not the Jensen-Shannon divergence. The arguments of KL are swapped, so the value is not bounded by ln 2 and
    reaches 1.61 for certain predictions of different classes. The final clamp is therefore active, with a zero
    gradient, exactly when the networks disagree most. Probabilities outside [low, high] have no gradient either.
    `clamp_result=False` keeps the gradient of the result; `jensen_shannon` has neither problem.

    Args:
        p_logits: logits of the first classifier, float [N, K].
        q_logits: logits of the second classifier, float [N, K].
        low: lower limit of probabilities, 0 < low < high.
        high: upper limit of probabilities, at most 1.
        clamp_result: whether to clamp the result to [0, 1], as in the authors' code.
        reduction: "mean" (as in the authors' code), "sum" or "none" over the N samples. The mean is clamped after
            averaging, as in the authors' code; with "none" and "sum" each sample is clamped.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: tensors of a wrong kind, different shapes, or options out of range.

    Paper: Yin et al., "Dreaming to Distill" (CVPR 2020), R_compete. The paper states the true Jensen-Shannon
    divergence; this function follows the authors' code.
    """
    require_same_shape(p_logits, q_logits, ("p_logits", "q_logits"), "N, K")
    low = check.real_number(low, "low", above=0)
    high = check.real_number(high, "high", above=low, most=1)
    p, q = p_logits.softmax(1), q_logits.softmax(1)
    m = ((p + q) / 2).clamp(low, high)
    divergence = (m * (m.log() - (p.clamp(low, high).log() + q.clamp(low, high).log()) / 2)).sum(1)
    if not check.boolean(clamp_result, "clamp_result"):
        return reduce(divergence, reduction)
    if reduction == "mean":
        return divergence.mean().clamp(0, 1)
    return reduce(divergence.clamp(0, 1), reduction)
