"""A client's side of one sum: five steps, each taken once and in order, with secrets that outlive the process between.

Where a step checks something, it guards against a server that does not do as it should: what it lets pass is all that
a client ever says.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fl.secure import _crypto, _shamir
from fl.secure._crypto import BOX_BYTES, KEY_BYTES
from fl.secure._signed_messages import Bundle, Round, announced
from fl.secure.keys import Keyring, Registry

__all__ = ["BOX", "SHARE", "Refused", "Session"]

SHARE = KEY_BYTES + 1
"""Bytes of a share: the field is a little larger than 256 bits."""
BOX = 2 * SHARE + BOX_BYTES
"""Bytes of a sealed box: a share of the mask key and one of the seed."""


class Refused(ValueError):
    """A client was asked for what would show its values, or those of others, to the server; it says nothing."""


@dataclass(frozen=True)
class Session:
    """One client in one sum.

    Attributes:
        keyring: its secrets.
        registry: the clients' public keys.
        about: which sum it is.
        client: its number.
    """

    keyring: Keyring
    registry: Registry
    about: Round
    client: int

    def announce(self) -> bytes:
        """Step 1: draw the keys of this round, and sign them. Whatever was under way before is forgotten."""
        (agreement, agreement_public), (mask, mask_public) = _crypto.new_pair(), _crypto.new_pair()
        seed = secrets.token_bytes(KEY_BYTES)
        identity = self.keyring.identity(self.client)
        if _crypto.identity_public(identity) != self.registry.of(self.client):
            raise Refused(f"the keyring's key of client {self.client} is not the one that the registry names")
        bundle = announced(self.about, self.client, identity, agreement_public, mask_public, seed)
        drawn = {"agreement": agreement, "mask": mask, "seed": seed, "bundle": bundle.raw}
        self._keep("keys", {name: value.hex() for name, value in drawn.items()})
        return bundle.raw

    def deal(self, bundles: Mapping[int, Bundle]) -> list[bytes]:
        """Step 2: check the others' keys; split one's own mask key and seed, and seal a share for each of them.

        Args:
            bundles: of all that take part, by client.

        Returns:
            A box for each client, in the order of their numbers; one's own is empty.

        Raises:
            Refused: too few take part, or one's own keys are not among them.
            NotAuthentic: keys that their client did not sign for this round; it is named.
        """
        held, count, threshold = self._at("keys"), len(bundles), self.about.threshold
        if not threshold <= count < 2 * threshold:
            raise Refused(
                f"the server says that {count} clients take part, and the threshold is {threshold}: it must be more "
                "than half of them, and no more than there are"
            )
        if self.client not in bundles or bundles[self.client].raw.hex() != held["bundle"]:
            raise Refused(f"the server passes on other keys of client {self.client} than it announced")
        for client, bundle in bundles.items():
            bundle.require(self.about, client, self.registry)
        if len({key for b in bundles.values() for key in (b.agreement, b.mask)}) < 2 * count:
            raise Refused("two clients announce the same key")
        transcript, everybody = self.about.transcript(bundles), sorted(bundles)
        points = [client + 1 for client in everybody]
        shares = [_shamir.split(int(held[name], 16), points, threshold) for name in ("mask", "seed")]
        pairs = dict(zip(everybody, ((m.to_bytes(SHARE), s.to_bytes(SHARE)) for m, s in zip(*shares))))
        boxes = [
            b"" if other == self.client else _crypto.seal_box(
                bytes.fromhex(held["agreement"]), bundles[other].agreement, b"".join(pairs[other]),
                self.about.between(transcript, self.client, other),
            )
            for other in everybody
        ]  # fmt: skip
        own = [share.hex() for share in pairs[self.client]]
        known = {str(client): bundles[client].raw.hex() for client in everybody}
        self._keep("shares", {**held, "transcript": transcript.hex(), "bundles": known, "own": own})
        return boxes

    def cover(self, vector: Tensor, boxes: Mapping[int, bytes]) -> Tensor:
        """Step 3: open the others' boxes, and mask the vector.

        Args:
            vector: int64 [length], on the CPU.
            boxes: by client that has dealt; one's own is not looked at.

        Raises:
            Refused: too few have dealt, or one that does not take part.
            NotAuthentic: a box that is not what its client sealed; it is named.
        """
        held = self._at("shares")
        bundles = {int(client): Bundle(bytes.fromhex(raw)) for client, raw in held["bundles"].items()}
        self._among(boxes, bundles, "has dealt")
        transcript, total = bytes.fromhex(held["transcript"]), vector.clone()
        shares = {str(self.client): held["own"]}
        for other, box in boxes.items():
            if other == self.client:
                continue
            about = self.about.between(transcript, other, self.client)
            try:
                opened = _crypto.open_box(bytes.fromhex(held["agreement"]), bundles[other].agreement, box, about)
                key = _crypto.mask_key(bytes.fromhex(held["mask"]), bundles[other].mask, transcript)
            except _crypto.NotAuthentic as error:
                raise _crypto.NotAuthentic(f"client {other}: {error}") from error
            shares[str(other)] = [opened[:SHARE].hex(), opened[SHARE:].hex()]
            _crypto.add_mask(total, key, 1 if self.client < other else -1)
        _crypto.add_mask(total, bytes.fromhex(held["seed"]), 1)
        self._keep("masked", {"transcript": held["transcript"], "shares": shares})  # the keys have done their work
        return total

    def assent(self, survivors: Sequence[int]) -> bytes:
        """Step 4: sign over whom the sum is, once.

        Args:
            survivors: the clients whose masked vectors have arrived, ascending.

        Raises:
            Refused: too few of them, or one that has not dealt.
        """
        held = self._at("masked")
        self._among(survivors, [int(client) for client in held["shares"]], "is in the sum")
        self._keep("assent", {**held, "survivors": list(survivors)})
        return _crypto.sign(self.keyring.identity(self.client), self._statement(held, survivors))

    def open(self, signatures: Mapping[int, bytes]) -> list[bytes]:
        """Step 5: once enough others have signed for the same sum, say what takes the masks off it, and forget all.

        Of a client in the sum that is the share of its own seed, of any other that of its mask key: never both.

        Args:
            signatures: by client.

        Returns:
            A share for each client that has dealt, in the order of their numbers.

        Raises:
            Refused: too few have signed.
            NotAuthentic: a signature that is not of its client, or for another sum; it is named.
        """
        held = self._at("assent")
        survivors: list[int] = held["survivors"]
        self._among(signatures, survivors, "has signed")
        statement = self._statement(held, survivors)
        for client, signature in signatures.items():
            if not _crypto.verify(self.registry.of(client), signature, statement):
                raise _crypto.NotAuthentic(
                    f"the signature of client {client} is not its own, or is for another sum than this client's"
                )
        self.keyring.end(self.client)
        return [bytes.fromhex(held["shares"][str(v)][v in survivors]) for v in self._partners(held)]

    def _statement(self, held: Mapping[str, Any], survivors: Sequence[int]) -> bytes:
        return self.about.sum_over(bytes.fromhex(held["transcript"]), self._partners(held), survivors)

    @staticmethod
    def _partners(held: Mapping[str, Any]) -> list[int]:
        return sorted(int(client) for client in held["shares"])

    def _among(
        self, clients: Mapping[int, Any] | Sequence[int], known: Mapping[int, Any] | Sequence[int], what: str
    ) -> None:
        """Refuse a set of clients that is too small, not within another, or without this client."""
        strange = sorted(set(clients) - set(known))
        if strange or len(set(clients)) < len(clients):
            which = f"client {strange[0]}" if strange else "one client twice"
            raise Refused(f"the server says that {which} {what}, which cannot be")
        if len(clients) < self.about.threshold:
            raise Refused(
                f"the server says that {len(clients)} clients are left, and a sum must be over {self.about.threshold}"
            )
        if self.client not in clients and what != "has signed":
            raise Refused(f"the server says that client {self.client} is not one that {what}, and asks it nevertheless")

    def _keep(self, step: str, values: Mapping[str, Any]) -> None:
        said = {"step": step, "seed_of_run": self.about.seed, "round": self.about.number}
        self.keyring.begin(self.client, {**values, **said})

    def _at(self, step: str) -> dict[str, Any]:
        """The secrets, if the client has taken this step in this round last."""
        held = self.keyring.session(self.client)
        found = "nothing" if held is None else f"{held['step']!r} of round {held['round']}"
        wanted = {"step": step, "seed_of_run": self.about.seed, "round": self.about.number}
        if held is None or {name: held[name] for name in wanted} != wanted:
            raise Refused(
                f"client {self.client} was asked for what follows {step!r} of round {self.about.number}, and the last "
                f"that it did is {found}: a step is taken once, in its order and its round"
            )
        return held
