"""Run clients in other processes of this machine, reached by bytes alone."""

from fl.deploy.loopback._backend import Loopback

__all__ = ["Loopback"]
