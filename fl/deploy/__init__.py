"""Runs whose clients are outside the server's process: in other processes of this machine, or on Flower's nodes."""

__all__: list[str] = []
__dir__ = __all__.copy
