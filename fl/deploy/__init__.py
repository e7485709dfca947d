"""Runs whose clients are on other machines, on Flower's nodes."""

__all__: list[str] = []
__dir__ = __all__.copy
