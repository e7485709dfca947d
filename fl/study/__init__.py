"""What federated runs add to a study: ways that run a method, their costs, their clients, what a run came to."""

from fl.study.costs import at_equal, to_target, worst_clients
from fl.study.experiment import Experiment
from fl.study.federated import Federated
from fl.study.outcome import outcome_hash

__all__ = ["Experiment", "Federated", "at_equal", "outcome_hash", "to_target", "worst_clients"]
