"""Who was trained on: scores of records, and attacks that compare a target with shadow models trained without them.

In order of cost: `nearest` needs the published images alone; `loss`, `margin` and `stable_logit` need the target model;
`lira` and `rmia` need shadow models beside it, trained as it was on random halves of the candidates. Each returns one
score a record, higher for "this one was trained on"; `attacks.roc` turns scores into rates.
"""

from attacks.membership.lira import VARIANCES, lira
from attacks.membership.nearest import nearest
from attacks.membership.rmia import rmia
from attacks.membership.scores import loss, margin, stable_logit

__all__ = ["VARIANCES", "lira", "loss", "margin", "nearest", "rmia", "stable_logit"]
