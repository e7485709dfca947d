"""What runs a method: rounds, what is delivered, where clients run, tests, files. It knows no method by name."""

from fl.engine.client_data import ClientData
from fl.engine.run import Run
from fl.engine.simulate import simulate
from fl.engine.store import CheckpointError

__all__ = ["CheckpointError", "ClientData", "Run", "simulate"]
__dir__ = __all__.copy
