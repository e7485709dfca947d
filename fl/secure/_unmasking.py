"""The server's side: taking the masks off a sum, with the shares that clients opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fl.method import NoUsableReply
from fl.secure import _crypto, _shamir
from fl.secure._crypto import KEY_BYTES
from fl.secure._signed_messages import Bundle

__all__ = ["Opening"]


@dataclass(frozen=True)
class Opening:
    """What the server knows when enough clients have opened their shares.

    Attributes:
        bundles: the keys that were announced, by client.
        transcript: their digest.
        partners: the clients whose masks are in the vectors, ascending.
        survivors: the clients whose vectors are in the sum.
        shares: by client that has opened: a share for each partner, in their order.
    """

    bundles: Mapping[int, Bundle]
    transcript: bytes
    partners: Sequence[int]
    survivors: Sequence[int]
    shares: Mapping[int, Sequence[bytes]]

    def lift(self, total: Tensor) -> None:
        """Take all masks off a sum, in place: those of the clients in it, and those with clients that are not.

        Args:
            total: int64 [length], the sum of the survivors' masked vectors, on the CPU.

        Raises:
            NoUsableReply: the shares of a client's secret give another secret than it announced.
        """
        openers = sorted(self.shares)
        counts = _shamir.coefficients([client + 1 for client in openers])
        for place, client in enumerate(self.partners):
            share = [int.from_bytes(self.shares[opener][place]) for opener in openers]
            secret = sum(s * c for s, c in zip(share, counts)) % _shamir.PRIME
            found = secret.to_bytes(KEY_BYTES + 1)
            inside = client in self.survivors
            if found[0] or not self._is_true(found[1:], client, inside):
                raise NoUsableReply(
                    f"what clients {openers} opened of client {client} is not what it announced: one of them, or it, "
                    "does not do as it should"
                )
            if inside:
                _crypto.add_mask(total, found[1:], -1)
                continue
            for other in self.survivors:
                key = _crypto.mask_key(found[1:], self.bundles[other].mask, self.transcript)
                _crypto.add_mask(total, key, -1 if other < client else 1)

    def _is_true(self, secret: bytes, client: int, inside: bool) -> bool:
        bundle = self.bundles[client]
        if inside:
            return _crypto.digest("seed", secret) == bundle.commitment
        return _crypto.public_of(secret) == bundle.mask
