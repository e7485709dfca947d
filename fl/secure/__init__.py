"""Secure aggregation: the server learns the sum of the clients' replies, but no single reply."""

from fl.secure._crypto import AuthenticationError, MissingCryptography
from fl.secure._session import ProtocolError
from fl.secure.keys import Keyring, Registry
from fl.secure.sums import SecureSums

__all__ = ["AuthenticationError", "Keyring", "MissingCryptography", "ProtocolError", "Registry", "SecureSums"]
__dir__ = __all__.copy
