"""Methods that are not weight averaging, and the papers as compositions."""

from fl.methods.feddm import FedDM, Real
from fl.methods.fedrep import fedrep

__all__ = [
    "FedDM",
    "Real",
    "fedrep",
]
