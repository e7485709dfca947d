"""Ideas on top of weight averaging, one file each."""

from fl.addons.decorr import FedDecorr
from fl.addons.ditto import Ditto
from fl.addons.feddf import FedDF
from fl.addons.fedexp import FedExP
from fl.addons.finetune import FineTune
from fl.addons.moon import MOON
from fl.addons.nova import Nova
from fl.addons.proximal import Proximal
from fl.addons.sam import SAM
from fl.addons.scaffold import Scaffold
from fl.addons.server_adaptive import ServerAdagrad, ServerAdam, ServerYogi
from fl.addons.server_momentum import ServerMomentum
from fl.addons.shared_image import SharedImage

__all__ = [
    "MOON",
    "SAM",
    "Ditto",
    "FedDF",
    "FedDecorr",
    "FedExP",
    "FineTune",
    "Nova",
    "Proximal",
    "Scaffold",
    "ServerAdagrad",
    "ServerAdam",
    "ServerMomentum",
    "ServerYogi",
    "SharedImage",
]
