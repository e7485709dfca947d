"""What federated runs add to a study: a folder of them, their costs, their clients."""

from fl.study.costs import at_equal, to_target, worst_clients
from fl.study.experiment import Experiment

__all__ = ["Experiment", "at_equal", "to_target", "worst_clients"]
