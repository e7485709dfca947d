"""Does a mechanism keep the (epsilon, delta) it claims? Tests of its outcomes, of its noise, and of its secret.

Statistics first: you run the mechanism many times, half of the runs with a record and half without it, let an attack
give each run one score or several, and hand the two worlds to `audit_claim` (is this claim false?) or `epsilon_lower_bound` (how large
is epsilon at least?). Where a run is too dear to repeat, `one_run_lower_bound` takes a single run with many planted records.

Two checks need no statistics, and see what no number of runs would: `audit_noise` holds the noise that was drawn
against what was charged, to the number, and `replay_release` tells whether a release can be had again by whoever knows its
noise.

An audit can refute a claim; it can never prove one. Every function says with which confidence it speaks.
"""

from attacks.audit.claim_test import ClaimTest, audit_claim
from attacks.audit.many_runs import epsilon_lower_bound, max_lower_bound
from attacks.audit.noise import NoiseAudit, ReplayTest, audit_noise, replay_release
from attacks.audit.single_run import one_run_lower_bound

__all__ = [
    "ClaimTest",
    "NoiseAudit",
    "ReplayTest",
    "audit_claim",
    "audit_noise",
    "epsilon_lower_bound",
    "max_lower_bound",
    "one_run_lower_bound",
    "replay_release",
]
__dir__ = __all__.copy
