"""Losses for knowledge distillation, and measures of disagreement between two classifiers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit._utils import check
from distillkit.losses._common import Reduction, reduce, require_same_shape

_PAIR = ("student_logits", "teacher_logits")


def knowledge_distillation(
    student_logits: Tensor, teacher_logits: Tensor, *, temperature: float = 1.0, reduction: Reduction = "mean"
) -> Tensor:
    """Compute the knowledge distillation loss between a student's and a teacher's predictions.

    The loss of a sample is T^2 * KL(softmax(teacher / T) || softmax(student / T)), in nats.

    Args:
        student_logits: logits of the student, float [N, K].
        teacher_logits: logits of the teacher, float [N, K]. They receive gradients, unless you detach them.
        temperature: temperature T > 0.
        reduction: "mean", "sum" or "none" over the N samples. "mean" corresponds to "batchmean" in PyTorch.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: an argument is not a floating-point tensor, the shapes differ, or an option is out of
            range.

    Paper: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015), Section 2. The factor T^2
    makes the scale of the gradient independent of T.
    """
    require_same_shape(student_logits, teacher_logits, _PAIR, "N, K")
    temperature = check.temperature(temperature)
    student = F.log_softmax(student_logits / temperature, dim=1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=1)
    return reduce(temperature**2 * (teacher.exp() * (teacher - student)).sum(1), reduction)


class KnowledgeDistillation(nn.Module):
    """`nn.Module` version of `knowledge_distillation`, with options in the constructor and logits in the call.

    Args:
        temperature, reduction: as in `knowledge_distillation`.
    """

    def __init__(self, *, temperature: float = 1.0, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.temperature = check.temperature(temperature)
        self.reduction: Reduction = check.one_of(reduction, "reduction", ("mean", "sum", "none"))

    def forward(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Compute the loss of a student's logits, given a teacher's logits; see `knowledge_distillation`.

        Args:
            student_logits, teacher_logits: logits, float [N, K].
        """
        return knowledge_distillation(
            student_logits, teacher_logits, temperature=self.temperature, reduction=self.reduction
        )


def binary_distillation(
    student_logits: Tensor, teacher_logits: Tensor, *, temperature: float = 1.0, reduction: Reduction = "mean"
) -> Tensor:
    """Compute the knowledge distillation loss for multi-label tasks, in which each label is a Bernoulli variable.

    The loss of a sample with teacher logits t_k and student logits s_k is T^2 * sum_k KL(Bernoulli(sigmoid(t_k / T)) ||
    Bernoulli(sigmoid(s_k / T))). Without T^2, this is the KL divergence of the joint distribution of all labels.

    Args:
        student_logits: logits of the student, float [N, K], one logit per label.
        teacher_logits: logits of the teacher, float [N, K].
        temperature: temperature T > 0.
        reduction: "mean", "sum" or "none" over the N samples.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: for the same reasons as in `knowledge_distillation`.

    Source: the loss of Hinton et al. (2015), section 2, applied to each label, with the two classes "present" and
    "absent". No paper states this loss.
    """
    require_same_shape(student_logits, teacher_logits, _PAIR, "N, K")
    temperature = check.temperature(temperature)
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
        TypeError, ValueError: an argument is not a floating-point tensor, the shapes differ, or the reduction is
            unknown.

    Paper: Lin, "Divergence Measures Based on the Shannon Entropy" (1991), section IV, with equal weights. The code of
    DeepInversion and FedCOG uses the name "Jensen-Shannon" for `clamped_disagreement`.
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

    Let P and Q be the softmax distributions of the classifiers, and M = (P + Q) / 2. P, Q and M are clamped to [low,
    high] without renormalization. The result is KL(M || P) / 2 + KL(M || Q) / 2, clamped to [0, 1]. In DeepInversion,
    the loss contains 1 minus this value.

    This is not the Jensen-Shannon divergence, because the arguments of KL are swapped. The value is therefore not
    bounded by ln 2: it reaches 1.61 if the classifiers predict different classes with certainty. The clamp of the
    result then makes the gradient zero exactly where the classifiers disagree most; pass `clamp_result=False` to
    prevent this. Probabilities outside [low, high] have no gradient either. `jensen_shannon` has neither problem.

    Args:
        p_logits: logits of the first classifier, float [N, K].
        q_logits: logits of the second classifier, float [N, K].
        low: lower limit of the probabilities, above 0 and below `high`.
        high: upper limit of the probabilities, at most 1.
        clamp_result: whether to clamp the result to [0, 1], as in the authors' code.
        reduction: "mean", "sum" or "none" over the N samples. With "mean", the mean is clamped, as in the authors'
            code. With "sum" and "none", the value of each sample is clamped.

    Returns:
        A scalar, or [N].

    Raises:
        TypeError, ValueError: an argument is not a floating-point tensor, the shapes differ, or an option is out of
            range.

    Paper: Yin et al., "Dreaming to Distill" (DeepInversion, CVPR 2020), R_compete. The paper states the true
    Jensen-Shannon divergence; this function follows the authors' code.
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
