"""Networks with a features/classifier split, and where components get networks from."""

from distillkit.networks.base import Network, build, frozen, initialize, split
from distillkit.networks.convnet import ConvNet
from distillkit.networks.layers import ImageNetwork, norm_layer

__all__ = ["ConvNet", "ImageNetwork", "Network", "build", "frozen", "initialize", "norm_layer", "split"]
