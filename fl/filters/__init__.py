"""Filters around any method: clipping and noise."""

from fl.filters.client_dp import Adaptive, ClientDP
from fl.filters.filter import Filter
from fl.filters.filtered import Filtered

__all__ = ["Adaptive", "ClientDP", "Filter", "Filtered"]
__dir__ = __all__.copy
