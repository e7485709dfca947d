"""Secure sums: the server sees what clients send in sum, and nothing of a single one."""

from fl.secure._crypto import MissingCryptography, NotAuthentic
from fl.secure._session import Refused
from fl.secure.keys import Keyring, Registry
from fl.secure.sums import SecureSums

__all__ = ["Keyring", "MissingCryptography", "NotAuthentic", "Refused", "Registry", "SecureSums"]
__dir__ = __all__.copy
