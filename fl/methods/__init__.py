"""Federated methods of papers.

`FedLGD`, `FedRep` and `SingleImage` are `FedAvg` with the add-ons and defaults of their papers. FedDM, its variants and
FedProto are methods of their own.
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
