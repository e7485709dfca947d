"""Run clients outside of the server process: in loopback processes or on Flower."""

__all__: list[str] = []
__dir__ = __all__.copy
