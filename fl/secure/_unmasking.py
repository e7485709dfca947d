"""Server side of a secure sum: remove the masks from the sum, with the shares that the clients disclosed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fl.method import NoUsableReply
from fl.secure import _crypto, _shamir
from fl.secure._crypto import KEY_BYTES
from fl.secure._signed_messages import KeyBundle

__all__ = ["Unmasking"]


@dataclass(frozen=True)
class Unmasking:
    """Data with which the server removes the masks from a sum, once enough clients have disclosed their shares.

    The shares are parts of the secrets from which the masks are generated: the seeds of clients whose vectors are in
    the sum, and the private keys of clients that dropped out.

    Attributes:
        bundles: announced keys of all participants, by client index.
        transcript: digest of the participants and their keys, see `RoundContext.transcript`.
        partners: indices of the clients that share pairwise masks with each other, in ascending order.
        survivors: indices of the clients whose masked vectors are in the sum.
        shares: shares that each client disclosed, by the index of that client: one share of each partner's secret, in
            the order of `partners`.
    """

    bundles: Mapping[int, KeyBundle]
    transcript: bytes
    partners: Sequence[int]
    survivors: Sequence[int]
    shares: Mapping[int, Sequence[bytes]]

    def unmask(self, total: Tensor) -> None:
        """Remove all masks from the sum, in place.

        Survivors are the clients whose vectors are in the sum; the other clients dropped out. Each vector has a private
        mask, and a pairwise mask for each other client. The pairwise masks between survivors cancel in the sum. The
        other masks are generated from the secrets that the disclosed shares give, and are removed.

        Args:
            total: sum of the survivors' masked vectors, int64 [length], on the CPU.

        Raises:
            NoUsableReply: a client's secret, recovered from its shares, does not match the key or digest that the
                client announced.
        """
        senders = sorted(self.shares)
        weights = _shamir.lagrange_coefficients([client + 1 for client in senders])
        for index, client in enumerate(self.partners):
            shares = [int.from_bytes(self.shares[sender][index]) for sender in senders]
            secret = sum(share * w for share, w in zip(shares, weights)) % _shamir.PRIME
            found = secret.to_bytes(KEY_BYTES + 1)
            survived = client in self.survivors
            if found[0] or not self._matches_bundle(found[1:], client, survived):
                raise NoUsableReply(
                    f"the shares of client {client}'s secret from clients {senders} do not give the secret that it "
                    "announced: one of these clients does not follow the protocol"
                )
            if survived:
                _crypto.add_mask(total, found[1:], -1)
                continue
            for other in self.survivors:
                key = _crypto.derive_mask_key(found[1:], self.bundles[other].mask, self.transcript)
                _crypto.add_mask(total, key, -1 if other < client else 1)

    def _matches_bundle(self, secret: bytes, client: int, survived: bool) -> bool:
        bundle = self.bundles[client]
        if survived:
            return _crypto.digest("seed", secret) == bundle.commitment
        return _crypto.agreement_public_key(secret) == bundle.mask
