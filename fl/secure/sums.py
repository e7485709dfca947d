"""Secure sums: a filter under which the server learns what clients send in sum, and nothing of a single one.

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017, figure 4, with all
that guards against a server that lies. Every two clients agree on a mask that one adds and the other subtracts; each
adds a mask of its own besides. In the sum of all the masks between clients cancel; those with a client that has
dropped out, and everybody's own, are taken off with secrets that any t clients can recover together, and fewer cannot.

A round has five exchanges in place of one. A method may have several in a round (`Method.exchanges`), a filter adds its
own before and after the training (`Filter.before`, `after`), and the engine plays them all alike, with threads, over
bytes and on Flower: it knows of no sums.

    announce   a client draws two keys (X25519) and a seed, and signs the public ones with the key (Ed25519) that the
               registry names
    deal       it checks everybody's signatures, splits its mask key and its seed into shares (Shamir, t of n), and
               seals for each other client one of each (ChaCha20-Poly1305); the server passes the boxes on
    local      it trains, writes its reply as whole numbers (`coding`), adds the masks (ChaCha20) and sends the sum
    assent     it signs over whom the sum is: the clients whose masked replies came
    disclose   it checks the others' signatures, and opens of every client in the sum its share of the seed, of every
               other one its share of the mask key: never both. Then it has forgotten everything.

What a client did last, and its secrets, lie in its keyring, and not in its memory: the server names the version of a
memory that counts, so it could have a step taken twice. Keys come from the operating system. So every run has other
masks; but they cancel to the last bit, and two runs have the same result.

Deviations. A bundle holds the digest of the seed, so that a false share is found out instead of spoiling the model. The
keys for boxes and the mask keys depend on the digest of all bundles too, so that clients who were told of different
partners have nothing in common. The box is opened before training, not at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from distillkit._utils import check
from fl.filters.filter import Filter
from fl.message import Entry, Message
from fl.method import Method, NoUsableReply
from fl.participants import Client, Server
from fl.reduce import Like, Reduced, Schema
from fl.secure import _crypto
from fl.secure._encoding import Layout
from fl.secure._requirements import require_sums
from fl.secure._session import BOX, SHARE, Session
from fl.secure._signed_messages import BUNDLE_BYTES, Bundle, Round
from fl.secure._unmasking import Opening
from fl.secure.keys import Keyring, Registry

__all__ = ["SecureSums"]


@dataclass(frozen=True)
class SecureSums(Filter):
    """The server sees sums over at least t clients, and no single client's reply (Bonawitz et al., CCS 2017).

    `Filtered(method, SecureSums(...))` stands around any method whose replies are sums or weighted means, weights
    included: what the server gets is the sum of weight times value, and the sum of the weights. What is no sum is
    refused by the entry's name. The result is that without the filter but for the rounding to whole numbers: at most
    W B / 2^(bits + 1) for each client in the sum, where B is the entry's public maximum and W that of its weight.

    **What is guaranteed.** A server that follows the protocol, or does not, together with up to 2 t - n - 1 of a
    round's n clients, learns the sum over at least t clients, and of the others in it nothing else. **What is not.**
    Sums say something themselves, and many of them more: this is no differential privacy. Clients may send what they
    like; nobody can look. Who takes part, how long it takes, that a client fails and with what error, that it has no
    images: the server sees all that. `docs/components/secure_sums.md` has the whole list.

    Args:
        registry: the clients' public keys; of whoever runs the federation, not of the server.
        keyring: where clients keep their secrets: on a node its own, in a simulation everybody's. Only clients need
            one.
        threshold: t, how many clients a sum is over at least; if fewer are left, the round ends. It must be more than
            half of those that take part in a round.
        most: entry -> B, the largest absolute value of a number in it, for entries that state none (`Entry.bound`, or a
            range in `expect`). They are public, so do not choose them from the clients' data. A client that has a
            larger one sends nothing, and says so by the entry's name.
        bits: how fine the whole numbers are; at most what the sum over the whole registry leaves room for.

    Attributes:
        maxima: `most` by the entries' keys.

    Raises:
        TypeError, ValueError: when built, for bad arguments, a method that is no sum, or a sum that could overflow.
        MissingCryptography: the cryptography library is not installed.
    """

    key = "SecureSums"
    before: ClassVar[tuple[str, ...]] = ("announce", "deal")
    after: ClassVar[tuple[str, ...]] = ("assent", "disclose")
    exact: ClassVar[bool] = False  # noise that was scaled to a clip would have to cover the rounding too

    registry: Registry
    keyring: Keyring | None = field(default=None, repr=False, kw_only=True)
    threshold: int = field(kw_only=True)
    most: Mapping[Entry[Any], float] | None = field(default=None, repr=False, kw_only=True)
    bits: int = field(default=40, kw_only=True)
    maxima: dict[str, float] = field(init=False)

    layout = Entry[str]("first", kept=True)
    clients = Entry[Tensor]("first")
    partners = Entry[Tensor]("first")
    survivors = Entry[Tensor]("first")
    signers = Entry[Tensor]("first")
    openers = Entry[Tensor]("first")
    bundles = Entry[Tensor]("union")
    boxes = Entry[Tensor]("union")
    masked = Entry[Tensor]("sum")
    signatures = Entry[Tensor]("union")
    shares = Entry[Tensor]("union")

    def __post_init__(self) -> None:
        _crypto.require_library()
        if not isinstance(self.registry, Registry):
            raise TypeError(f"registry must be a Registry of public keys, got {type(self.registry).__name__}")
        if self.keyring is not None and not isinstance(self.keyring, Keyring):
            raise TypeError(f"keyring must be a Keyring(folder) or None, got {type(self.keyring).__name__}")
        check.positive_int(self.threshold, "threshold", least=2, most=len(self.registry))
        check.positive_int(self.bits, "bits", most=52)
        given = {} if self.most is None else self.most
        if not isinstance(given, Mapping):
            raise TypeError(f"most must map entries, as FedAvg.update, to their maxima, got {type(given).__name__}")
        wrong = [e for e in given if not isinstance(e, Entry)]
        if wrong:
            raise TypeError(f"most must map entries, as FedAvg.update, to their maxima, got {wrong[0]!r}")
        maxima = {e.key: check.real_number(b, f"most of {e.name}", above=0.0) for e, b in given.items()}
        object.__setattr__(self, "maxima", dict(sorted(maxima.items())))
        Layout((), self.bits, len(self.registry))

    @property
    def sealed(self) -> bool:
        """Whether the server learns sums alone: yes."""
        return True

    # What the two sides agree on.

    def check(self, method: Method) -> None:
        """Refuse a method whose server reads single replies."""
        require_sums(method)

    def start(self, server: Server, expected: Schema, entries: Mapping[str, Entry[Any]]) -> None:
        """Find out how a reply is written as one vector, and tell the clients from then on.

        Raises:
            PrivacyError, ValueError: an entry of the replies is no sum, or has no public maximum; it is named.
        """
        missing = [k for k in range(server.clients) if k not in self.registry]
        if missing:
            raise ValueError(
                f"client {missing[0]} is not in the registry ({self.registry}): enrol every client and build the "
                "registry of all"
            )
        layout = Layout.of(expected, entries, self.maxima, self.bits, len(self.registry))
        server.state[self.layout] = layout.text()

    def _about(self, side: Server | Client) -> Round:
        return Round(side.seed, side.round, self.threshold)

    def expect(self, server: Server, client: int, schema: Schema) -> None:
        """A reply is one vector of whole numbers, and nothing else.

        Raises:
            ValueError: this client's replies, or this round's, have another form than those at the start.
        """
        layout = Layout.read(server.state[self.layout])
        if not layout.fits(schema):
            raise ValueError(
                f"the replies of client {client} in round {server.round} have another form than client 0's at the "
                "start, and such do not add up"
            )
        length = layout.only(schema).length
        schema.clear()
        schema[self.masked.key] = Like(torch.zeros((), dtype=torch.int64).expand(length))

    # On a client, in the order of a round.

    def _session(self, client: Client) -> Session:
        if self.keyring is None:
            raise ValueError("SecureSums has no keyring where the client is: give it keyring=Keyring(folder) there")
        return Session(self.keyring, self.registry, self._about(client), client.id)

    def announce(self, client: Client, message: Message) -> Message:
        """Step 1 of a `client`: draw this round's keys, and say the public ones. The `message` says nothing."""
        return Message({self.bundles: _bytes([self._session(client).announce()])})

    def deal(self, client: Client, message: Message) -> Message:
        """Step 2 of a `client`: check everybody's keys in the `message`, and seal a share of its secrets for each."""
        boxes = self._session(client).deal(_bundles(message[self.clients], message[self.bundles]))
        return Message({self.boxes: _bytes([box.ljust(BOX, b"\0") for box in boxes])[None]})

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        """Step 3: the reply as whole numbers under masks. What was counted for the history stays with the client."""
        client.notes.clear()
        session = self._session(client)
        vector = Layout.read(message[self.layout]).encode(reply)
        boxes = dict(zip(message[self.partners].tolist(), _rows(message[self.boxes])))
        return Message({self.masked: session.cover(vector, boxes)})

    def assent(self, client: Client, message: Message) -> Message:
        """Step 4 of a `client`: sign over whom the sum is, as the `message` says."""
        return Message({self.signatures: _bytes([self._session(client).assent(message[self.survivors].tolist())])})

    def disclose(self, client: Client, message: Message) -> Message:
        """Step 5 of a `client`: if enough have signed (`message`), open what takes the masks off this sum, no more."""
        signatures = dict(zip(message[self.signers].tolist(), _rows(message[self.signatures])))
        return Message({self.shares: _bytes(self._session(client).open(signatures))[None]})

    # On the server, in the order of a round.

    def send(self, server: Server, client: int, message: Message) -> None:
        """With the training: how a reply is written, and the boxes that others have sealed for this client."""
        if self.partners in server.state and self.survivors not in server.state:
            place = server.state[self.clients].tolist().index(client)
            message[self.layout] = server.state[self.layout]
            message[self.partners] = server.state[self.partners]
            message[self.boxes] = server.state[self.boxes][:, place].clone()

    def send_in(self, server: Server, verb: str, client: int) -> Message:
        """What a client needs for a step besides the training."""
        told = {
            "announce": (),
            "deal": (self.clients, self.bundles),
            "assent": (self.survivors,),
            "disclose": (self.signers, self.signatures),
        }[verb]
        return Message({entry: server.state[entry] for entry in told})

    def expect_in(self, server: Server, verb: str, client: int) -> Schema:
        """Bytes, of the length that a step has."""
        count = {"deal": self.clients, "disclose": self.partners}.get(verb)
        many = len(server.state[count]) if count is not None else 0
        entry, shape = {
            "announce": (self.bundles, (1, BUNDLE_BYTES)),
            "deal": (self.boxes, (1, many, BOX)),
            "assent": (self.signatures, (1, _crypto.SIGNATURE_BYTES)),
            "disclose": (self.shares, (1, many, SHARE)),
        }[verb]
        return {entry.key: Like(torch.zeros(shape, dtype=torch.uint8))}

    def receive_in(self, server: Server, verb: str, replies: Reduced) -> Mapping[int, str]:
        """Keep what the next step needs; name those whose keys or signatures are not theirs.

        Raises:
            NoUsableReply: fewer are left than a sum must be over.
            ValueError: so many take part that the threshold is no more than half of them.
        """
        entry, who = {
            "announce": (self.bundles, self.clients),
            "deal": (self.boxes, self.partners),
            "local": (None, self.survivors),
            "assent": (self.signatures, self.signers),
            "disclose": (self.shares, self.openers),
        }[verb]
        rejected = self._rejected(server, verb, replies)
        good = [client for client in replies.clients if client not in rejected]
        if len(good) < self.threshold:
            lost = sorted(set(server.drawn) - set(good))
            raise NoUsableReply(
                f"after {verb!r} {len(good)} clients are left and a sum must be over {self.threshold} (threshold); "
                f"clients {lost} dropped out, and nobody's masks were taken off"
                + "".join(f"; client {k}: {why}" for k, why in rejected.items())
            )
        if verb == "announce" and 2 * self.threshold <= len(good):
            raise ValueError(
                f"threshold must be more than half of the {len(good)} clients of a round, got {self.threshold}: else a "
                "server could have two sums opened"
            )
        server.state[who] = torch.tensor(good, dtype=torch.int64)
        if entry is not None:
            server.state[entry] = replies[entry][[replies.clients.index(client) for client in good]]
        return rejected

    def _rejected(self, server: Server, verb: str, replies: Reduced) -> dict[int, str]:
        """The clients whose keys or signatures are not theirs: the others would refuse to go on with them."""
        found: dict[int, str] = {}
        about = self._about(server)
        if verb == "announce" and self.bundles in replies:
            for client, bundle in _bundles(torch.tensor(replies.clients), replies[self.bundles]).items():
                try:
                    bundle.require(about, client, self.registry)
                except _crypto.NotAuthentic as error:
                    found[client] = str(error)
        if verb == "assent" and self.signatures in replies:
            statement = about.sum_over(
                self._transcript(server), server.state[self.partners].tolist(), server.state[self.survivors].tolist()
            )
            for client, signature in zip(replies.clients, _rows(replies[self.signatures])):
                if not _crypto.verify(self.registry.of(client), signature, statement):
                    found[client] = "has signed for another sum, or not with its own key"
        return found

    def _transcript(self, server: Server) -> bytes:
        return self._about(server).transcript(_bundles(server.state[self.clients], server.state[self.bundles]))

    def back(self, server: Server, replies: Reduced, expected: Schema) -> Reduced:
        """Take the masks off the sum, and read it as the method's reduced replies.

        Raises:
            NoUsableReply: what clients opened is not what was announced.
        """
        state = server.state
        shares: Tensor = state[self.shares]
        opened = zip(state[self.openers].tolist()[: self.threshold], shares)
        survivors: list[int] = state[self.survivors].tolist()
        opening = Opening(
            bundles=_bundles(state[self.clients], state[self.bundles]), transcript=self._transcript(server),
            partners=state[self.partners].tolist(), survivors=survivors,
            shares={client: _rows(rows) for client, rows in opened},
        )  # fmt: skip
        total = replies[self.masked].clone().cpu()
        opening.lift(total)
        layout = Layout.read(state[self.layout])
        server.notes["secure_sum"] = {"clients": len(survivors), "recovered": len(opening.partners) - len(survivors)}
        for entry in (
            self.clients, self.bundles, self.partners, self.boxes, self.survivors, self.signers, self.signatures,
            self.openers, self.shares,
        ):  # fmt: skip
            del state[entry]
        return layout.decode(total.to(replies[self.masked].device), survivors, expected)


def _bytes(rows: list[bytes]) -> Tensor:
    """Rows of one length as a tensor, uint8 [rows, bytes]."""
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), -1)


def _rows(tensor: Tensor) -> list[bytes]:
    """The rows of a tensor uint8 [rows, bytes] as bytes."""
    return [bytes(row.tolist()) for row in tensor]


def _bundles(clients: Tensor, raw: Tensor) -> dict[int, Bundle]:
    return {client: Bundle(row) for client, row in zip(clients.tolist(), _rows(raw))}
