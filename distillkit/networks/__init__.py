"""Networks with separate features and classifier, their initialization, and network samplers."""

from distillkit.networks._base import Network, split
from distillkit.networks._factory import KeepInit, build, frozen_copy
from distillkit.networks._initialization import initialize
from distillkit.networks._layers import ImageNetwork, norm_layer
from distillkit.networks.cnn import FedCOGCNN, LeNet, SimpleCNN
from distillkit.networks.convnet import ConvNet
from distillkit.networks.registry import NETWORK_NAMES, named_network
from distillkit.networks.resnet import CifarResNet, ResNet, WideResNet
from distillkit.networks.samplers import FixedNetwork, NetworkBall, NetworkSampler, RandomNetworks

__all__ = [
    "NETWORK_NAMES",
    "CifarResNet",
    "ConvNet",
    "FedCOGCNN",
    "FixedNetwork",
    "ImageNetwork",
    "KeepInit",
    "LeNet",
    "Network",
    "NetworkBall",
    "NetworkSampler",
    "RandomNetworks",
    "ResNet",
    "SimpleCNN",
    "WideResNet",
    "build",
    "frozen_copy",
    "initialize",
    "named_network",
    "norm_layer",
    "split",
]
__dir__ = __all__.copy
