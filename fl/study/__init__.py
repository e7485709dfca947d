"""What federated runs add to a study: ways that run a method, their costs and clients, and runs repeated."""

from fl.study._outcome_hash import outcome_hash
from fl.study.costs import at_equal, to_target, worst_clients
from fl.study.federated import Federated
from fl.study.repeat import repeat
from fl.study.saved_run import Loaded, NotRepeatable, load

__all__ = [
    "Federated",
    "Loaded",
    "NotRepeatable",
    "at_equal",
    "load",
    "outcome_hash",
    "repeat",
    "to_target",
    "worst_clients",
]
__dir__ = __all__.copy
