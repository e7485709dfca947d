"""Methods that are not weight averaging, and the papers as compositions."""

from fl.methods.feddm import FedDM
from fl.methods.fedlgd import FedLGD
from fl.methods.fedproto import FedProto
from fl.methods.fedrep import fedrep
from fl.methods.private_feddm import PrivateFedDM
from fl.methods.real import Real
from fl.methods.single_image import ClippedCrossEntropy, single_image
from fl.methods.summed_feddm import SummedFedDM

__all__ = [
    "ClippedCrossEntropy",
    "FedDM",
    "FedLGD",
    "FedProto",
    "PrivateFedDM",
    "Real",
    "SummedFedDM",
    "fedrep",
    "single_image",
]
