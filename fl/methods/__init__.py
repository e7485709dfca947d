"""Methods that are not weight averaging, and the papers as compositions."""

from fl.methods.feddm import FedDM
from fl.methods.fedlgd import FedLGD
from fl.methods.fedproto import FedProto
from fl.methods.fedrep import fedrep
from fl.methods.real import Real
from fl.methods.single_image import ClippedCrossEntropy, single_image

__all__ = [
    "ClippedCrossEntropy",
    "FedDM",
    "FedLGD",
    "FedProto",
    "Real",
    "fedrep",
    "single_image",
]
