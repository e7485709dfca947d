"""Does a mechanism keep the (epsilon, delta) it claims? Tests of its outcomes, of its noise, and of its secret.

Statistics first: you run the mechanism many times, half of the runs with a record and half without it, let an attack
give each run one score or several, and hand the two worlds to `refutes` (is this claim false?) or `many_run` (how large
is epsilon at least?). Where a run is too dear to repeat, `one_run` takes a single run with many planted records.

Two checks need no statistics, and see what no number of runs would: `noise_balance` holds the noise that was drawn
against what was charged, to the number, and `replay` tells whether a release can be had again by whoever knows its
noise.

An audit can refute a claim; it can never prove one. Every function says with which confidence it speaks.
"""

from attacks.audit.claim_test import Verdict, refutes
from attacks.audit.many_runs import ceiling, many_run
from attacks.audit.noise import Balance, Replay, noise_balance, replay
from attacks.audit.single_run import one_run

__all__ = [
    "Balance",
    "Replay",
    "Verdict",
    "ceiling",
    "many_run",
    "noise_balance",
    "one_run",
    "refutes",
    "replay",
]
__dir__ = __all__.copy
