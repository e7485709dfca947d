"""Engine that runs a federated method: rounds, messages to and from clients, evaluation, and the run's files.

The engine works for every `fl.method.Method`, and contains no code for a particular one."""

from fl.engine._clients import ClientData
from fl.engine._config import RunFolder
from fl.engine.run import Run
from fl.engine.simulate import simulate
from fl.engine.store import CheckpointError

__all__ = ["CheckpointError", "ClientData", "Run", "RunFolder", "simulate"]
__dir__ = __all__.copy
