"""Networks with a features/classifier split, and where components get networks from."""

from distillkit.networks.base import Network, split
from distillkit.networks.cnn import FedCOGCNN, LeNet, SimpleCNN
from distillkit.networks.convnet import ConvNet
from distillkit.networks.factory import AsMade, build, frozen, initialize
from distillkit.networks.layers import ImageNetwork, norm_layer
from distillkit.networks.registry import NETWORK_NAMES, named_network
from distillkit.networks.resnet import CifarResNet, ResNet, WideResNet
from distillkit.networks.samplers import FixedNetwork, NetworkBall, NetworkSampler, RandomNetworks

__all__ = [
    "NETWORK_NAMES",
    "AsMade",
    "CifarResNet",
    "ConvNet",
    "FedCOGCNN",
    "FixedNetwork",
    "ImageNetwork",
    "LeNet",
    "Network",
    "NetworkBall",
    "NetworkSampler",
    "RandomNetworks",
    "ResNet",
    "SimpleCNN",
    "WideResNet",
    "build",
    "frozen",
    "initialize",
    "named_network",
    "norm_layer",
    "split",
]
__dir__ = __all__.copy
