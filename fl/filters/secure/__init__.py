"""Secure sums: the server sees what clients send in sum, and nothing of a single one."""

from fl.filters.secure.keys import Keyring, Registry
from fl.filters.secure.library import MissingCryptography, NotAuthentic
from fl.filters.secure.session import Refused
from fl.filters.secure.sums import SecureSums

__all__ = ["Keyring", "MissingCryptography", "NotAuthentic", "Refused", "Registry", "SecureSums"]
