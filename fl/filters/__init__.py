"""Filters, which process the replies of any method: clipping, noise and measurements."""

from fl.filters.client_dp import Adaptive, ClientDP
from fl.filters.filter import Filter
from fl.filters.filtered import Filtered
from fl.filters.set_quality import SetQuality

__all__ = ["Adaptive", "ClientDP", "Filter", "Filtered", "SetQuality"]
__dir__ = __all__.copy
