"""Client side of a secure sum, which consists of five steps. A client takes each step once in a round, in order.

The checks in each step protect the client against a server that deviates from the protocol. A client sends only the
results of the steps. Its secrets are kept on disk until the last step, so the client may be restarted between steps.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fl.secure import _crypto, _shamir
from fl.secure._crypto import BOX_OVERHEAD, KEY_BYTES
from fl.secure._signed_messages import KeyBundle, RoundContext, sign_bundle
from fl.secure.keys import Keyring, Registry

SHARE_BYTES = KEY_BYTES + 1
"""Size of a share in bytes. A share is a number of a field that is slightly larger than 256 bits."""
BOX_BYTES = 2 * SHARE_BYTES + BOX_OVERHEAD
"""Size in bytes of an encrypted message ("box"), which contains one share of the mask key and one of the seed."""


class ProtocolError(ValueError):
    """Error: a request of the server violates the protocol. The client does not reply, to protect its secret values."""


@dataclass(frozen=True)
class ClientSession:
    """Client's part of one secure sum, with a method for each of the five steps that `fl.secure.sums` describes.

    Attributes:
        keyring: folder of the client's secrets.
        registry: public keys of all clients.
        context: run, round and threshold of the sum, to which all signatures are bound.
        client: index of the client.
    """

    keyring: Keyring
    registry: Registry
    context: RoundContext
    client: int

    def announce_keys(self) -> bytes:
        """Step 1 of a secure sum: draw the keys and the mask seed for this round, and sign the public keys.

        The secrets of an earlier, unfinished sum are deleted.

        Returns:
            The bytes of the client's `KeyBundle`.

        Raises:
            ProtocolError: the client's private signing key does not match its public key in the registry.
        """
        (agreement, agreement_public), (mask, mask_public) = _crypto.new_agreement_keys(), _crypto.new_agreement_keys()
        seed = secrets.token_bytes(KEY_BYTES)
        signing_key = self.keyring.signing_key(self.client)
        if _crypto.signing_public_key(signing_key) != self.registry.of(self.client):
            raise ProtocolError(f"the keyring's key of client {self.client} is not its key in the registry")
        bundle = sign_bundle(self.context, self.client, signing_key, agreement_public, mask_public, seed)
        drawn = {"agreement": agreement, "mask": mask, "seed": seed, "bundle": bundle.raw}
        self._save("keys", {name: value.hex() for name, value in drawn.items()})
        return bundle.raw

    def share_secrets(self, bundles: Mapping[int, KeyBundle]) -> list[bytes]:
        """Step 2 of a secure sum: split the client's mask key and seed into shares, and encrypt the shares.

        The announced keys of all participants are checked first. Each other client gets one share of the mask key and
        one share of the seed.

        Args:
            bundles: announced keys of all participants, by client index.

        Returns:
            A box (encrypted message) for each participant, in the order of the client indices. The box for this client
            itself is empty.

        Raises:
            ProtocolError: the threshold is not more than half of the participants, or exceeds their number; this
                client's keys are missing or were changed; or two clients announce the same key.
            AuthenticationError: a bundle was not signed by its client for this round.
        """
        session, count, threshold = self._load("keys"), len(bundles), self.context.threshold
        if not threshold <= count < 2 * threshold:
            raise ProtocolError(
                f"the server says that {count} clients take part, and the threshold is {threshold}: it must be more "
                "than half of them, and no more than all of them"
            )
        if self.client not in bundles or bundles[self.client].raw.hex() != session["bundle"]:
            raise ProtocolError(f"the server passes on keys of client {self.client} that it did not announce")
        for client, bundle in bundles.items():
            bundle.verify(self.context, client, self.registry)
        if len({key for b in bundles.values() for key in (b.agreement, b.mask)}) < 2 * count:
            raise ProtocolError("two clients announce the same key")
        transcript, everybody = self.context.transcript(bundles), sorted(bundles)
        points = [client + 1 for client in everybody]
        shares = [_shamir.split(int(session[name], 16), points, threshold) for name in ("mask", "seed")]
        pairs = dict(zip(everybody, ((m.to_bytes(SHARE_BYTES), s.to_bytes(SHARE_BYTES)) for m, s in zip(*shares))))
        boxes = [
            b"" if other == self.client else _crypto.seal_box(
                bytes.fromhex(session["agreement"]), bundles[other].agreement, b"".join(pairs[other]),
                self.context.box_context(transcript, self.client, other),
            )
            for other in everybody
        ]  # fmt: skip
        own = [share.hex() for share in pairs[self.client]]
        raw = {str(client): bundles[client].raw.hex() for client in everybody}
        self._save("shares", {**session, "transcript": transcript.hex(), "bundles": raw, "own": own})
        return boxes

    def mask_vector(self, vector: Tensor, boxes: Mapping[int, bytes]) -> Tensor:
        """Step 3 of a secure sum: add all masks of this client to its encoded reply.

        The client also decrypts and stores the shares that the other clients sent: each is a share of the sender's
        secrets.

        Args:
            vector: the encoded reply, int64 [length], on the CPU.
            boxes: encrypted messages with these shares, by the sender's client index. A message from this client itself
                is ignored.

        Returns:
            The masked vector, int64 [length].

        Raises:
            ProtocolError: there are fewer senders than the threshold, or a sender does not take part in the round.
            AuthenticationError: a message was not encrypted by its alleged sender.
        """
        session = self._load("shares")
        bundles = {int(client): KeyBundle(bytes.fromhex(raw)) for client, raw in session["bundles"].items()}
        self._check_clients(boxes, bundles, "shared its secrets")
        transcript, total = bytes.fromhex(session["transcript"]), vector.clone()
        shares = {str(self.client): session["own"]}
        for other, box in boxes.items():
            if other == self.client:
                continue
            context = self.context.box_context(transcript, other, self.client)
            try:
                opened = _crypto.open_box(bytes.fromhex(session["agreement"]), bundles[other].agreement, box, context)
                key = _crypto.derive_mask_key(bytes.fromhex(session["mask"]), bundles[other].mask, transcript)
            except _crypto.AuthenticationError as error:
                raise _crypto.AuthenticationError(f"client {other}: {error}") from error
            shares[str(other)] = [opened[:SHARE_BYTES].hex(), opened[SHARE_BYTES:].hex()]
            _crypto.add_mask(total, key, 1 if self.client < other else -1)
        _crypto.add_mask(total, bytes.fromhex(session["seed"]), 1)
        self._save("masked", {"transcript": session["transcript"], "shares": shares})  # the keys are no longer needed
        return total

    def sign_survivors(self, survivors: Sequence[int]) -> bytes:
        """Step 4 of a secure sum: return a signature of the set of clients in the sum.

        A client signs only one set per round.

        Args:
            survivors: indices of the clients whose masked vectors the server has received, in ascending order.

        Raises:
            ProtocolError: there are fewer survivors than the threshold, or a survivor did not share its secrets.
        """
        session = self._load("masked")
        self._check_clients(survivors, [int(client) for client in session["shares"]], "is in the sum")
        self._save("assent", {**session, "survivors": list(survivors)})
        return _crypto.sign(self.keyring.signing_key(self.client), self._sum_digest(session, survivors))

    def disclose_shares(self, signatures: Mapping[int, bytes]) -> list[bytes]:
        """Step 5 of a secure sum: check the clients' signatures, and disclose shares of secrets.

        For each client in the sum, this client discloses its share of that client's mask seed. For each client that
        dropped out, it discloses its share of that client's mask key. It never discloses both shares for the same
        client. This client's secrets of the round are deleted before the shares are returned.

        Args:
            signatures: signatures with which clients confirm the set of clients in the sum, by the signer's index.

        Returns:
            A share for each client that shared its secrets, in the order of the client indices.

        Raises:
            ProtocolError: there are fewer signatures than the threshold, or a signer is not in the sum.
            AuthenticationError: a signature is forged, or is for another set of clients or another round.
        """
        session = self._load("assent")
        survivors: list[int] = session["survivors"]
        self._check_clients(signatures, survivors, "has signed")
        statement = self._sum_digest(session, survivors)
        for client, signature in signatures.items():
            if not _crypto.verify(self.registry.of(client), signature, statement):
                raise _crypto.AuthenticationError(
                    f"the signature of client {client} is forged, or for another sum than this client's"
                )
        self.keyring.delete_session(self.client)
        return [bytes.fromhex(session["shares"][str(v)][v in survivors]) for v in self._partners(session)]

    def _sum_digest(self, session: Mapping[str, Any], survivors: Sequence[int]) -> bytes:
        return self.context.sum_digest(bytes.fromhex(session["transcript"]), self._partners(session), survivors)

    @staticmethod
    def _partners(session: Mapping[str, Any]) -> list[int]:
        return sorted(int(client) for client in session["shares"])

    def _check_clients(
        self, clients: Mapping[int, Any] | Sequence[int], allowed: Mapping[int, Any] | Sequence[int], action: str
    ) -> None:
        """Check a set of clients that the server sent with a request."""
        strange = sorted(set(clients) - set(allowed))
        if strange or len(set(clients)) < len(clients):
            which = f"client {strange[0]}" if strange else "one client twice"
            raise ProtocolError(f"the server says that {which} {action}, which is impossible")
        if len(clients) < self.context.threshold:
            raise ProtocolError(
                f"the server says that {len(clients)} clients are left, below the threshold of {self.context.threshold}"
            )
        if self.client not in clients and action != "has signed":
            raise ProtocolError(f"the server does not say that client {self.client} {action}, but sends it a request")

    def _save(self, step: str, values: Mapping[str, Any]) -> None:
        state = {"step": step, "seed_of_run": self.context.seed, "round": self.context.number}
        self.keyring.save_session(self.client, {**values, **state})

    def _load(self, step: str) -> dict[str, Any]:
        """Read and return the secrets that the client saved in its last step."""
        session = self.keyring.load_session(self.client)
        found = "nothing" if session is None else f"{session['step']!r} of round {session['round']}"
        wanted = {"step": step, "seed_of_run": self.context.seed, "round": self.context.number}
        if session is None or {name: session[name] for name in wanted} != wanted:
            raise ProtocolError(
                f"client {self.client} was asked for the step after {step!r} of round {self.context.number}, and its "
                f"last step is {found}: each step is taken once, in order and in its round"
            )
        return session
