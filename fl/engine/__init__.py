"""The engine: rounds, exchanges with clients, evaluation and records. It does not depend on any particular method."""

from fl.engine._clients import ClientData
from fl.engine._config import RunFolder
from fl.engine.run import Run
from fl.engine.simulate import simulate
from fl.engine.store import CheckpointError

__all__ = ["CheckpointError", "ClientData", "Run", "RunFolder", "simulate"]
__dir__ = __all__.copy
