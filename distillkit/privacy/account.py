"""Accounts: which client and round of a ledger a release is charged to, and where its noise comes from."""

from __future__ import annotations

from distillkit.privacy.events import ALL_CLIENTS, Event, Guarantee, client_id
from distillkit.privacy.ledger import Ledger
from distillkit.privacy.noise import Secret, as_secret

__all__ = ["Account"]


class Account:
    """A ledger with the client and round to charge, and the source of the noise.

    Private calls accept it as `ledger=` wherever they accept a `Ledger`. A `Ledger` alone charges all clients, which is
    always safe, and takes its noise from the operating system.

    Args:
        ledger: the ledger that is charged before noise is drawn.
        client: the client whose records are released, a number or a name.
        round: when, for the reader of the ledger.
        secret: the source of noise and Poisson draws; see `Secret`. With a seed no guarantee holds.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        client: int | str = ALL_CLIENTS,
        round: int = 0,
        secret: Secret | int | None = None,
    ) -> None:
        if not isinstance(ledger, Ledger):
            raise TypeError(f"ledger must be a Ledger, got {type(ledger).__name__}")
        self.ledger, self.client, self.round = ledger, client_id(client), round
        self.secret = as_secret(secret)

    @classmethod
    def of(cls, ledger: Ledger | Account) -> Account:
        """Return an account as it is, and wrap a ledger in an account for all clients."""
        return ledger if isinstance(ledger, Account) else cls(ledger)

    def event(self, mechanism: str, sigma: float, *, rate: float = 1.0, count: int = 1) -> Event:
        """Return the event of `count` releases on this account.

        Args:
            mechanism, sigma, rate, count: see `Event`.
        """
        return Event(mechanism, sigma, rate, count, self.client, self.round, seeded=self.secret.seeded)

    def spend(self, mechanism: str, sigma: float, *, rate: float = 1.0, count: int = 1) -> None:
        """Charge `count` releases to the ledger; call it before their noise is drawn. See `Ledger.spend`.

        Args:
            mechanism, sigma, rate, count: see `Event`.
        """
        self.ledger.spend(self.event(mechanism, sigma, rate=rate, count=count))

    def guarantee(self) -> Guarantee:
        """Return the guarantee for this client's records; see `Ledger.guarantee`."""
        return self.ledger.guarantee(self.client)
