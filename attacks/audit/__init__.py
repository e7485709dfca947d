"""Audits of differential-privacy claims, by statistics over many runs, or by exact checks of the noise.

For a statistical audit, run the mechanism many times, half of the runs with a record and half without it. Let an attack
give each run one or several scores (`step_scores` for DP-SGD), and pass the scores of both groups to `audit_claim`
(which tests a claim) or `epsilon_lower_bound` (which bounds epsilon from below). If the mechanism is too expensive to
repeat, `one_run_lower_bound` uses a single run with many canaries, which are records made for the audit.

`low_bit_scores` scores the low bits of releases, in which floating-point noise can reveal the data.

`audit_noise` needs no statistics, and detects errors that statistical audits miss: it compares the number of noise
values that a run drew with the number that its privacy ledger was charged for.

An audit can refute a claim but never prove one. Every function states the confidence of its result.
"""

from attacks.audit.claim_audit import ClaimTest, audit_claim
from attacks.audit.likelihood_ratio import step_scores
from attacks.audit.low_bits import low_bit_scores
from attacks.audit.many_runs import epsilon_lower_bound, max_lower_bound
from attacks.audit.noise import NoiseAudit, audit_noise
from attacks.audit.single_run import one_run_lower_bound

__all__ = [
    "ClaimTest", "NoiseAudit", "audit_claim", "audit_noise", "epsilon_lower_bound",
    "low_bit_scores", "max_lower_bound", "one_run_lower_bound", "step_scores",
]  # fmt: skip
__dir__ = __all__.copy
