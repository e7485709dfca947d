"""Federated runs in studies: candidates for a study, tables of costs, and reading and repeating saved runs."""

from fl.study.costs import at_equal, to_target, worst_clients
from fl.study.federated import Federated
from fl.study.repeat import repeat
from fl.study.saved_run import NotRepeatable, SavedRun, load, outcome_hash

__all__ = [
    "Federated", "NotRepeatable", "SavedRun", "at_equal", "load", "outcome_hash", "repeat", "to_target",
    "worst_clients",
]  # fmt: skip
__dir__ = __all__.copy
