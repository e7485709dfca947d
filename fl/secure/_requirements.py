"""Whether a server can do with sums over clients alone; if not, what needs more, and what to do."""

from __future__ import annotations

from distillkit.privacy import PrivacyError
from fl.averaging.fedavg import FedAvg
from fl.filters._boundable import asking, reading
from fl.method import Method

__all__ = ["require_sums"]


def require_sums(method: Method) -> None:
    """Refuse a method that cannot stand inside secure sums; called when they are put around it.

    What its replies hold is known only when it starts: see `fl.secure._encoding.Layout`.

    Args:
        method: as it was built.

    Raises:
        PrivacyError: naming what reads single replies.
    """
    if method.draws_clients:
        raise PrivacyError(
            f"{type(method).__name__} draws its clients in secret, and may draw nobody; a secure sum is over clients "
            "that know of each other: take either"
        )
    if who := asking(method):
        raise PrivacyError(
            f"{who} asks every client before round 1, and the server would read each single answer: leave it out"
        )
    if isinstance(method, FedAvg) and len(method.networks.names) > 1:
        raise PrivacyError(
            "clients with several architectures send replies of several forms, and which one is whose would show: take "
            "one network"
        )
    if who := reading(method):
        raise PrivacyError(
            f"{who} reads each single reply on the server (read_reply), and there will be none to read: leave it out"
        )
