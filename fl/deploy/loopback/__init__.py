"""Backend that runs clients in other processes of this machine, which exchange only bytes with the server."""

from fl.deploy.loopback._backend import Loopback

__all__ = ["Loopback"]
