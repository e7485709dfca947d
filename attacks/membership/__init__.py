"""Who was trained on: scores of records, and attacks that compare a target with shadow models trained without them."""

from attacks.membership.lira import VARIANCES, lira
from attacks.membership.nearest import nearest
from attacks.membership.rmia import rmia
from attacks.membership.scores import loss, margin, stable_logit

__all__ = ["VARIANCES", "lira", "loss", "margin", "nearest", "rmia", "stable_logit"]
