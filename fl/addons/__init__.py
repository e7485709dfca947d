"""Add-ons for `FedAvg` from papers, to be used as in `FedAvg(FedProx(0.01), SCAFFOLD(), factory=...)`.

The docstring of each class names its paper, the implemented equations, the options, and the differences from the paper.
"""

from fl.addons.anchors import Anchors
from fl.addons.client_drift import ClientDrift
from fl.addons.condensed import Condensed
from fl.addons.ditto import Ditto
from fl.addons.dp_sgd import DPSGD
from fl.addons.fedcog import FedCOG
from fl.addons.feddecorr import FedDecorr
from fl.addons.feddf import FedDF
from fl.addons.fedexp import FedExP
from fl.addons.fedgen import FedGen
from fl.addons.fednova import FedNova
from fl.addons.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fl.addons.fedprox import FedProx
from fl.addons.fedreg import FedReg
from fl.addons.fedsam import FedSAM
from fl.addons.finetune import FineTune
from fl.addons.local_accuracy import LocalAccuracy
from fl.addons.moon import MOON
from fl.addons.robust_mean import RobustMean
from fl.addons.scaffold import SCAFFOLD
from fl.addons.shared_image import SharedImage, SharedPool
from fl.addons.vfa import VFA
from fl.addons.vftl import VFTL
from fl.addons.vhl import VHL, NaiveVHL

__all__ = [
    "DPSGD", "MOON", "SCAFFOLD", "VFA", "VFTL", "VHL", "Anchors", "ClientDrift", "Condensed", "Ditto", "FedAdagrad",
    "FedAdam", "FedAvgM", "FedCOG", "FedDF", "FedDecorr", "FedExP", "FedGen", "FedNova", "FedProx", "FedReg", "FedSAM",
    "FedYogi", "FineTune", "LocalAccuracy", "NaiveVHL", "RobustMean", "SharedImage", "SharedPool",
]  # fmt: skip
__dir__ = __all__.copy
