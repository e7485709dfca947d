"""Ideas on top of weight averaging, one file each."""

from fl.addons.proximal import Proximal

__all__ = ["Proximal"]
