"""Server side of a secure sum: remove the masks from the sum, with the shares that the clients disclosed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fl.method import NoUsableReply
from fl.secure import _crypto, _shamir
from fl.secure._crypto import KEY_BYTES
from fl.secure._signed_messages import KeyBundle


def unmask(
    total: Tensor,
    bundles: Mapping[int, KeyBundle],
    transcript: bytes,
    partners: Sequence[int],
    survivors: Sequence[int],
    shares: Mapping[int, Sequence[bytes]],
) -> None:
    """Remove all masks from the sum of the survivors' masked vectors, in place.

    Survivors are the partners whose vectors are in the sum; the other partners dropped out. The pairwise masks between
    survivors cancel. All other masks are generated from the secrets that the disclosed shares give.

    Args:
        total: the sum, int64 [length], on the CPU.
        bundles: announced keys of all participants, by client index.
        transcript: digest of the participants and their keys, see `RoundContext.transcript`.
        partners: indices of the clients that share pairwise masks with each other, in ascending order.
        survivors: indices of the clients whose masked vectors are in the sum.
        shares: shares that each client disclosed, by the index of that client: one share of each partner's secret, in
            the order of `partners`.

    Raises:
        NoUsableReply: a client's secret, recovered from its shares, does not match the key or digest that the client
            announced.
    """
    senders = sorted(shares)
    weights = _shamir.lagrange_coefficients([client + 1 for client in senders])
    for index, client in enumerate(partners):
        parts = [int.from_bytes(shares[sender][index]) for sender in senders]
        found = (sum(part * w for part, w in zip(parts, weights)) % _shamir.PRIME).to_bytes(KEY_BYTES + 1)
        overflow, secret, bundle, survived = found[0], found[1:], bundles[client], client in survivors
        if survived:
            matches = _crypto.digest("seed", secret) == bundle.commitment
        else:
            matches = _crypto.agreement_public_key(secret) == bundle.mask
        if overflow or not matches:
            raise NoUsableReply(
                f"the shares of client {client}'s secret from clients {senders} do not give the secret that it "
                "announced: one of these clients does not follow the protocol"
            )
        if survived:
            _crypto.add_mask(total, secret, -1)
            continue
        for other in survivors:
            key = _crypto.derive_mask_key(secret, bundles[other].mask, transcript)
            _crypto.add_mask(total, key, -1 if other < client else 1)
