"""Weight averaging: FedAvg, what its add-ons are, one client's training, and the order of one local step."""

from fl.averaging.addon import AddOn
from fl.averaging.fedavg import FedAvg
from fl.averaging.local import Local
from fl.averaging.step import Output, Step

__all__ = ["AddOn", "FedAvg", "Local", "Output", "Step"]
