"""What stands between any method and the wire: clipping, noise, sums."""

from fl.filters.client_dp import Adaptive, ClientDP
from fl.filters.filter import Filter
from fl.filters.filtered import Filtered
from fl.filters.secure import Keyring, Registry, SecureSums

__all__ = ["Adaptive", "ClientDP", "Filter", "Filtered", "Keyring", "Registry", "SecureSums"]
