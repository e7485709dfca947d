"""Membership inference: scores of records, and attacks that compare a target with shadow models.

The target is the model (or published set) that is attacked. The attacks need different access to it. `nearest` needs
only the published images, and `label_only` only the model's decisions. `loss`, `margin` and `stable_logit` need the
model's logits, and `gradient_norm` the model itself. `lira`, `rmia` and `shadow_classifier` also need shadow models,
which are trained like the target on random halves of the candidate records. `run_shadows` trains them by running a
`Pipeline` many times.

Each of these attacks returns one score per record, higher for training members. `attacks.roc` turns scores into rates,
and `leave_one_out` evaluates attacks on many targets. `canary_attack` plants records with wrong labels ("canaries") in
the training set of a teacher, and tests whether a model that learned from the teacher repeats these labels.
"""

from attacks.membership.canaries import CanaryAttack, canary_attack, plant_canaries
from attacks.membership.classifier import shadow_classifier
from attacks.membership.gradients import gradient_kde, gradient_norm
from attacks.membership.label_only import label_only
from attacks.membership.leave_one_out import SHADOW_ATTACKS, Attack, AttackResult, leave_one_out
from attacks.membership.lira import VARIANCES, lira
from attacks.membership.nearest import nearest
from attacks.membership.pipeline import Pipeline, Scorer, model_scorer
from attacks.membership.rmia import rmia
from attacks.membership.scores import loss, margin, stable_logit
from attacks.membership.shadow_models import Cost, estimate_cost, halves, run_shadows
from attacks.membership.shadow_scores import ShadowScores, Target

__all__ = [
    "SHADOW_ATTACKS", "VARIANCES", "Attack", "AttackResult", "CanaryAttack", "Cost", "Pipeline",
    "Scorer", "ShadowScores", "Target", "canary_attack", "estimate_cost", "gradient_kde", "gradient_norm", "halves",
    "label_only", "leave_one_out", "lira", "loss", "margin", "model_scorer", "nearest", "plant_canaries", "rmia",
    "run_shadows", "shadow_classifier", "stable_logit",
]  # fmt: skip
__dir__ = __all__.copy
