"""Audits of differential-privacy claims: tests of a mechanism's outcomes, of its noise, and of the noise's secrecy.

For a statistical audit, run the mechanism many times, half of the runs with a record and half without it. Let an attack
give each run one or several scores (`step_scores` for DP-SGD), and pass both groups to `audit_claim` (which tests a
claim) or `epsilon_lower_bound` (which bounds epsilon from below). If the mechanism is too expensive to repeat,
`one_run_lower_bound` uses a single run with many canaries.

Two checks need no statistics and detect errors that statistical audits miss. `audit_noise` compares the exact amounts
of noise drawn and charged. `replay_release` tests whether a release can be reproduced by someone who knows its noise.

An audit can refute a claim but never prove one. Every function states the confidence of its result.
"""

from attacks.audit.claim_audit import ClaimTest, audit_claim
from attacks.audit.likelihood_ratio import step_scores
from attacks.audit.many_runs import epsilon_lower_bound, max_lower_bound
from attacks.audit.noise import NoiseAudit, ReplayTest, audit_noise, replay_release
from attacks.audit.single_run import one_run_lower_bound

__all__ = [
    "ClaimTest", "NoiseAudit", "ReplayTest", "audit_claim", "audit_noise", "epsilon_lower_bound", "max_lower_bound",
    "one_run_lower_bound", "replay_release", "step_scores",
]  # fmt: skip
__dir__ = __all__.copy
