"""Weight averaging: FedAvg, what its add-ons are and see, one client's training, and the order of one local step."""

from fl.averaging._composition import require_full_models
from fl.averaging.addon import AddOn
from fl.averaging.fedavg import FedAvg
from fl.averaging.local import Local
from fl.averaging.server import AveragingServer
from fl.averaging.settings import Settings
from fl.averaging.step import Output, Step

__all__ = ["AddOn", "AveragingServer", "FedAvg", "Local", "Output", "Settings", "Step", "require_full_models"]
__dir__ = __all__.copy
