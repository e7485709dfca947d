"""Federated methods of papers: FedDM, its variants and FedProto, and methods that consist of `FedAvg` and add-ons.

`FedLGD`, `FedRep` and `SingleImage` are `FedAvg` with their papers' defaults; they override no function of `FedAvg`.
"""

from fl.methods.feddm import FedDM
from fl.methods.fedlgd import FedLGD
from fl.methods.fedproto import FedProto
from fl.methods.fedrep import FedRep
from fl.methods.private_feddm import PrivateFedDM
from fl.methods.real import Real
from fl.methods.single_image import ClippedCrossEntropy, SingleImage
from fl.methods.summed_feddm import SummedFedDM

__all__ = [
    "ClippedCrossEntropy", "FedDM", "FedLGD", "FedProto", "FedRep", "PrivateFedDM", "Real", "SingleImage",
    "SummedFedDM",
]  # fmt: skip
__dir__ = __all__.copy
