"""Networks with a features/classifier split, and where components get networks from."""

from distillkit.networks.base import Network, build, frozen, initialize, split

__all__ = ["Network", "build", "frozen", "initialize", "split"]
