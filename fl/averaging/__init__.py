"""Weight averaging: `FedAvg`, `AddOn` (the base class of its extensions), and the objects that extensions get."""

from fl.averaging._composition import require_full_models
from fl.averaging.addon import AddOn
from fl.averaging.fedavg import FedAvg
from fl.averaging.local import Local
from fl.averaging.optimizer import ClientOptimizer
from fl.averaging.server import AveragingServer
from fl.averaging.settings import Settings
from fl.averaging.step import Output, Step

__all__ = [
    "AddOn", "AveragingServer", "ClientOptimizer", "FedAvg", "Local", "Output", "Settings", "Step",
    "require_full_models",
]  # fmt: skip
__dir__ = __all__.copy
