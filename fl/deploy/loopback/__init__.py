"""Backend that runs clients in other processes of this machine. The clients and the server exchange only bytes."""

from fl.deploy.loopback._backend import Loopback

__all__ = ["Loopback"]
