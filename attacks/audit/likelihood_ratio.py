"""Scores for `audit_claim`, computed from training runs with many private steps, such as DP-SGD."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check


def step_scores(steps: Tensor, sigma: float, *, rate: float = 1.0) -> Tensor:
    """Return two scores for each run, to pass to `audit_claim`. A run consists of several private steps.

    In DP-SGD, every step draws the audited record with probability `rate` and adds noise. Project each released step on
    the record's gradient, and divide by the sensitivity. The result is N(0, sigma^2) without the record, and
    N(b, sigma^2) with it, where b is 1 with probability `rate` and 0 otherwise. The first score is the log-likelihood
    ratio of these two distributions, summed over the steps. For a correct mechanism, this score distinguishes runs with
    the record from runs without it as well as possible.

    The second score is the largest projection minus the smallest. It detects a bug that the likelihood ratio misses:
    noise that is drawn once and added in every step.

    Args:
        steps: projections in units of the sensitivity, float [n, T]: n runs of T steps.
        sigma: noise multiplier, > 0: the noise's standard deviation divided by the sensitivity. Pass the value from
            which the claimed epsilon is computed.
        rate: sampling rate of the record, in (0, 1]. Pass the value from which the claimed epsilon is computed.

    Returns:
        Scores, float64 [n, 2].

    Raises:
        TypeError, ValueError: `steps` is not a matrix of finite floats, or a value is out of range.
    """
    sigma = check.real_number(sigma, "sigma", above=0.0)
    rate = check.real_number(rate, "rate", above=0.0, most=1.0)
    values = check.matrix(steps, "steps").detach().double().cpu()
    ratios = (values - 0.5) / sigma**2
    rates = torch.tensor([1 - rate, rate], dtype=torch.float64).log()
    logs = torch.logaddexp(rates[0].expand_as(ratios), rates[1] + ratios)
    return torch.stack([logs.sum(1), values.amax(1) - values.amin(1)], 1)
