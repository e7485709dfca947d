"""Ideas on top of weight averaging, one file each."""

from fl.addons.anchors import Anchors
from fl.addons.condensed import Condensed
from fl.addons.decorr import FedDecorr
from fl.addons.ditto import Ditto
from fl.addons.dp_sgd import DPSGD
from fl.addons.fedcog import FedCOG
from fl.addons.feddf import FedDF
from fl.addons.fedexp import FedExP
from fl.addons.fedgen import FedGen
from fl.addons.fedreg import FedReg
from fl.addons.finetune import FineTune
from fl.addons.local_accuracy import LocalAccuracy
from fl.addons.moon import MOON
from fl.addons.nova import Nova
from fl.addons.proximal import Proximal
from fl.addons.sam import SAM
from fl.addons.scaffold import Scaffold
from fl.addons.server_adaptive import ServerAdagrad, ServerAdam, ServerYogi
from fl.addons.server_momentum import ServerMomentum
from fl.addons.shared_image import SharedImage
from fl.addons.shared_pool import SharedPool
from fl.addons.vfa import VFA
from fl.addons.vftl import VFTL
from fl.addons.vhl import VHL, NaiveVHL

__all__ = [
    "DPSGD",
    "MOON",
    "SAM",
    "VFA",
    "VFTL",
    "VHL",
    "Anchors",
    "Condensed",
    "Ditto",
    "FedCOG",
    "FedDF",
    "FedDecorr",
    "FedExP",
    "FedGen",
    "FedReg",
    "FineTune",
    "LocalAccuracy",
    "NaiveVHL",
    "Nova",
    "Proximal",
    "Scaffold",
    "ServerAdagrad",
    "ServerAdam",
    "ServerMomentum",
    "ServerYogi",
    "SharedImage",
    "SharedPool",
]
