"""Methods that are not weight averaging, and the papers as compositions."""

from fl.methods.feddm import FedDM, Real

__all__ = ["FedDM", "Real"]
