"""Whether a server can do with sums over clients alone; if not, what needs more, and what to do."""

from __future__ import annotations

from distillkit.privacy import PrivacyError
from fl.averaging.addon import fills
from fl.averaging.fedavg import FedAvg
from fl.method import Method

__all__ = ["require_sums"]


def require_sums(method: Method) -> None:
    """Refuse a method that cannot stand inside secure sums; called when they are put around it.

    What its replies hold is known only when it starts: see `fl.filters.secure.coding.Layout`.

    Args:
        method: as it was built.

    Raises:
        PrivacyError: naming what reads single replies.
    """
    name, addons = type(method).__name__, method.addons if isinstance(method, FedAvg) else ()
    if method.draws_clients:
        raise PrivacyError(
            f"{name} draws its clients in secret, and may draw nobody; a secure sum is over clients that know of each "
            "other: take either"
        )
    if method.asks:
        asking = next((a.name for a in addons if a.asks), name)
        raise PrivacyError(
            f"{asking} asks every client before round 1, and the server would read each single answer: leave it out"
        )
    if isinstance(method, FedAvg) and len(method.networks.names) > 1:
        raise PrivacyError(
            "clients with several architectures send replies of several forms, and which one is whose would show: take "
            "one network"
        )
    reads = [a.name for a in addons if fills(a, "read_reply")]
    if not reads and type(method).read_reply not in (Method.read_reply, FedAvg.read_reply):
        reads = [name]
    if reads:
        raise PrivacyError(
            f"{reads[0]} reads each single reply on the server (read_reply), and there will be none to read: leave it "
            "out"
        )
