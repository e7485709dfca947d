"""Secure aggregation as a filter: the server learns the sum of the clients' replies, but no single reply.

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017, figure 4, with all
protections against a malicious server. Every pair of clients agrees on a mask, which one client adds and the other
client subtracts. These pairwise masks cancel in the sum. Each client also adds a private mask, which is generated from
a seed. The server must remove the private masks, and the pairwise masks of clients that have dropped out. The secrets
that are needed for this can be recovered by any t clients together, but not by fewer.

A round has five exchanges instead of one:

    announce   The client draws two X25519 key pairs (a "box key" for encryption and a "mask key" for pairwise masks)
               and a seed. It signs both public keys and the digest of the seed with its Ed25519 key, whose public key
               is in the `Registry` that all clients have. The public keys, the digest and the signature together are
               called a bundle.
    deal       The client checks the signatures of all bundles. It splits the private key of its mask key pair, and its
               seed, into shares (Shamir, t of n). It encrypts a share of each for every other client
               (ChaCha20-Poly1305). Such an encrypted message is called a box. The server forwards the boxes.
    local      The client trains, encodes its reply as integers (`_encoding`), adds the masks (ChaCha20) and sends the
               result.
    assent     The client signs the set of clients in the sum, which are the clients whose masked reply has arrived.
    disclose   The client checks the other clients' signatures of this set, and deletes its secrets. For every client in
               the sum, it then discloses its share of that client's seed. For every client that dropped out, it
               discloses its share of the private key of that client's mask key pair. It never discloses both shares for
               the same client.

The engine treats these steps like any other exchanges (`Filter.before`, `Filter.after`).

The name of the client's last step and its secrets are stored in its keyring (a folder on the client), and not in its
memory (`Client.memory`). The server chooses which version of the memory a client uses, so it could otherwise make a
client repeat a step. Keys come from the operating system's random generator, so the masks differ between runs. The
results do not differ, because the masks cancel exactly.

The protocol deviates from the paper in three points. The digest of the seed is not part of the paper's protocol; with
it, a false share is detected, and cannot corrupt the model. The keys of boxes and masks also depend on the digest of
all bundles, which is not so in the paper. Clients that received different bundles from the server therefore have no
common keys. Boxes are opened before training; in the paper, they are opened at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.privacy import PrivacyError
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging.fedavg import FedAvg
from fl.filters._boundable import query_sender, reply_reader
from fl.filters.filter import Filter
from fl.message import Entry, Message
from fl.method import Method, NoUsableReply
from fl.participants import Client, Server
from fl.secure import _crypto
from fl.secure._encoding import ReplyLayout
from fl.secure._session import BOX_BYTES, SHARE_BYTES, ClientSession
from fl.secure._signed_messages import BUNDLE_BYTES, KeyBundle, RoundContext
from fl.secure._unmasking import unmask
from fl.secure.keys import Keyring, Registry


@dataclass(frozen=True)
class SecureSums(Filter):
    """Secure aggregation filter: the server sees sums over at least t clients (Bonawitz et al., CCS 2017).

    `Filtered(method, SecureSums(...))` wraps any method whose replies are aggregated by sums or weighted means. For
    each entry of the replies, such as a tensor, the server receives the sum of weight times value, and the sum of the
    weights. A method with other aggregation rules is refused. Values are rounded, which changes a sum by at most W B /
    2^(bits + 1) for each client in the sum. Here B is the public maximum of the entry's absolute value, and W the
    public maximum of the weight.

    **Guarantee.** Suppose that a server, honest or malicious, colludes with up to 2 t - n - 1 of a round's n clients.
    The server then learns the sum over at least t clients, and nothing else about the other clients' replies. **Not
    covered.** The filter does not provide differential privacy: sums reveal something about the clients' data, and the
    sums of many rounds reveal more. Clients may send any values within the maxima. The server sees participation,
    durations, failures with their errors, and which clients have no images. `docs/components/secure_sums.md` has the
    full list.

    Args:
        registry: public keys of all clients. Get it from the operator of the federation, not from the server.
        keyring: folder with the secrets of the node's client, or of all clients in a simulation. The server needs no
            keyring.
        threshold: t, the smallest allowed number of clients in a sum. If fewer clients remain, the run ends with
            `NoUsableReply`. The threshold must be more than half of the participants of a round.
        bounds: B, the largest allowed absolute value, by entry. You must give B for every entry that has no maximum in
            the schema of replies (`expect`). The maxima are public, so do not derive them from the clients' data. If a
            client's value is larger, the client fails and sends no reply.
        bits: precision of the encoding: B is encoded as 2^bits. A sum over all clients of the registry must fit into 64
            bits.

    Attributes:
        maxima: values of `bounds`, by the keys of the entries.

    Raises:
        TypeError, ValueError: an argument is not valid, or a sum could overflow.
        PrivacyError: the replies of the method in `Filtered` are not aggregated by sums.
        MissingCryptography: the `cryptography` library is not installed.
    """

    before: ClassVar[tuple[str, ...]] = ("announce", "deal")
    after: ClassVar[tuple[str, ...]] = ("assent", "disclose")

    registry: Registry
    keyring: Keyring | None = field(default=None, repr=False, kw_only=True)
    threshold: int = field(kw_only=True)
    bounds: Mapping[Entry[Any], float] | None = field(default=None, repr=False, kw_only=True)
    bits: int = field(default=40, kw_only=True)
    maxima: dict[str, float] = field(init=False)

    layout = Entry[str]("first", cached=True)
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
        _crypto.require_cryptography()
        if not isinstance(self.registry, Registry):
            raise TypeError(f"registry must be a Registry of public keys; got {type(self.registry).__name__}")
        if self.keyring is not None and not isinstance(self.keyring, Keyring):
            raise TypeError(f"keyring must be a Keyring(folder) or None; got {type(self.keyring).__name__}")
        check.positive_int(self.threshold, "threshold", least=2, most=len(self.registry))
        check.positive_int(self.bits, "bits", most=52)
        given = {} if self.bounds is None else self.bounds
        if not isinstance(given, Mapping) or not all(isinstance(e, Entry) for e in given):
            raise TypeError(f"bounds must map entries, such as FedAvg.update, to their maxima; got {given!r:.80}")
        maxima = {e.key: check.real_number(b, f"bound of {e.key}", above=0.0) for e, b in given.items()}
        object.__setattr__(self, "maxima", dict(sorted(maxima.items())))
        ReplyLayout((), self.bits, len(self.registry))

    @property
    def sealed(self) -> bool:
        """True: the server learns only sums of the clients' replies."""
        return True

    # Setup, shared by both sides.

    def check(self, method: Method) -> None:
        """Refuse a method that needs the replies of single clients; see `require_sums`."""
        require_sums(method)

    def start(self, server: Server, expected: Schema, entries: Mapping[str, Entry[Any]]) -> None:
        """Compute the layout of the encoded replies, which clients receive with their training requests.

        Raises:
            PrivacyError: an entry of the replies is not aggregated by a sum or mean.
            ValueError: an entry has no public maximum of its absolute value, or a client's public keys are not in the
                option `registry`.
        """
        missing = [k for k in range(server.clients) if k not in self.registry]
        if missing:
            raise ValueError(
                f"client {missing[0]} is not in the registry ({self.registry}): enrol every client, and build the "
                "registry from all of them"
            )
        layout = ReplyLayout.from_schema(expected, entries, self.maxima, self.bits, len(self.registry))
        server.state[self.layout] = layout.to_json()

    def _context(self, side: Server | Client) -> RoundContext:
        return RoundContext(side.seed, side.round, self.threshold)

    def expect(self, server: Server, client: int, schema: Schema) -> None:
        """Replace the entries of a reply's schema by one integer vector, the masked encoding of the reply.

        Raises:
            ValueError: the schema does not match the layout of replies that was set at the start of the run.
        """
        layout = ReplyLayout.from_json(server.state[self.layout])
        if not layout.matches(schema):
            raise ValueError(
                f"the replies of client {client} in round {server.round} have another layout than client 0's at the "
                "start, so they cannot be summed"
            )
        length = layout.select(schema).length
        schema.clear()
        schema[self.masked.key] = EntrySpec(torch.zeros((), dtype=torch.int64).expand(length))

    # Client side, in the order of a round.

    def _client_session(self, client: Client) -> ClientSession:
        if self.keyring is None:
            raise ValueError("SecureSums has no keyring on this client: pass keyring=Keyring(folder)")
        return ClientSession(self.keyring, self.registry, self._context(client), client.id)

    def announce(self, client: Client, message: Message) -> Message:
        """Step 1 of a secure sum, on a client: draw this round's keys, and return the signed public keys.

        The `message` is empty.
        """
        return Message({self.bundles: _bytes([self._client_session(client).announce_keys()])})

    def deal(self, client: Client, message: Message) -> Message:
        """Step 2 of a secure sum, on a client: return encrypted shares of its secrets.

        All participants' announced keys, which the `message` contains, are checked first.
        """
        boxes = self._client_session(client).share_secrets(_bundles(message[self.clients], message[self.bundles]))
        return Message({self.boxes: _bytes([box.ljust(BOX_BYTES, b"\0") for box in boxes])[None]})

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        """Step 3 of a secure sum, on a client: encode the method's reply, and return the masked vector."""
        session = self._client_session(client)
        vector = ReplyLayout.from_json(message[self.layout]).encode(reply)
        boxes = dict(zip(message[self.partners].tolist(), _rows(message[self.boxes])))
        return Message({self.masked: session.mask_vector(vector, boxes)})

    def assent(self, client: Client, message: Message) -> Message:
        """Step 4 of a secure sum, on a client: sign the set of clients in the sum, which the `message` names."""
        signature = self._client_session(client).sign_survivors(message[self.survivors].tolist())
        return Message({self.signatures: _bytes([signature])})

    def disclose(self, client: Client, message: Message) -> Message:
        """Step 5 of a secure sum, on a client: return shares of secrets, with which the server removes the masks.

        The other clients' signatures, which the `message` contains, are checked first.
        """
        signatures = dict(zip(message[self.signers].tolist(), _rows(message[self.signatures])))
        return Message({self.shares: _bytes(self._client_session(client).disclose_shares(signatures))[None]})

    # Server side, in the order of a round.

    def send(self, server: Server, client: int, message: Message) -> None:
        """Add encrypted shares, and the layout of the encoded reply, to a client's training request.

        In the earlier step "deal", every other client split the secrets behind its masks into shares, and encrypted one
        share of each secret for this client. These encrypted shares are added to the request.

        Args:
            server: the server.
            client: index of the client.
            message: the request, which is changed in place.
        """
        if self.partners in server.state and self.survivors not in server.state:
            index = server.state[self.clients].tolist().index(client)
            message[self.layout] = server.state[self.layout]
            message[self.partners] = server.state[self.partners]
            message[self.boxes] = server.state[self.boxes][:, index].clone()

    def send_exchange(self, server: Server, verb: str, client: int) -> Message:
        """Return the request to a client in a step of a secure sum other than the training.

        Args:
            server: the server.
            verb: name of the step: "announce", "deal", "assent" or "disclose".
            client: index of the client.
        """
        entries: tuple[Entry[Any], ...] = {
            "announce": (),
            "deal": (self.clients, self.bundles),
            "assent": (self.survivors,),
            "disclose": (self.signers, self.signatures),
        }[verb]
        return Message({entry: server.state[entry] for entry in entries})

    def expect_exchange(self, server: Server, verb: str, client: int) -> Schema:
        """Return the schema of a client's reply in a step other than the training: bytes of a fixed length."""
        count = {"deal": self.clients, "disclose": self.partners}.get(verb)
        length = len(server.state[count]) if count is not None else 0
        entry, shape = {
            "announce": (self.bundles, (1, BUNDLE_BYTES)),
            "deal": (self.boxes, (1, length, BOX_BYTES)),
            "assent": (self.signatures, (1, _crypto.SIGNATURE_BYTES)),
            "disclose": (self.shares, (1, length, SHARE_BYTES)),
        }[verb]
        return {entry.key: EntrySpec(torch.zeros(shape, dtype=torch.uint8))}

    def receive_exchange(self, server: Server, verb: str, replies: AggregatedReplies) -> Mapping[int, str]:
        """Store the clients' replies to one step in the server's state, for the next step.

        Returns:
            The reasons why clients with invalid keys or an invalid signature are left out, by client index.

        Raises:
            NoUsableReply: fewer clients remain than the threshold.
            ValueError: the threshold is not more than half of the participants.
        """
        entry, members = {
            "announce": (self.bundles, self.clients),
            "deal": (self.boxes, self.partners),
            "local": (None, self.survivors),
            "assent": (self.signatures, self.signers),
            "disclose": (self.shares, self.openers),
        }[verb]
        invalid = self._invalid_clients(server, verb, replies)
        good = [client for client in replies.clients if client not in invalid]
        if len(good) < self.threshold:
            lost = sorted(set(server.drawn) - set(good))
            raise NoUsableReply(
                f"after {verb!r} {len(good)} clients are left, fewer than threshold={self.threshold}; clients {lost} "
                "dropped out, and no masks were removed" + "".join(f"; client {k}: {why}" for k, why in invalid.items())
            )
        if verb == "announce" and 2 * self.threshold <= len(good):
            raise ValueError(
                f"threshold must be more than half of the {len(good)} clients of a round; got {self.threshold}, with "
                "which the server could unmask two sums"
            )
        server.state[members] = torch.tensor(good, dtype=torch.int64)
        if entry is not None:
            server.state[entry] = replies[entry][[replies.clients.index(client) for client in good]]
        return invalid

    def _invalid_clients(self, server: Server, verb: str, replies: AggregatedReplies) -> dict[int, str]:
        """Find the clients whose public keys or signature are invalid."""
        found: dict[int, str] = {}
        context = self._context(server)
        if verb == "announce" and self.bundles in replies:
            for client, bundle in _bundles(torch.tensor(replies.clients), replies[self.bundles]).items():
                try:
                    bundle.verify(context, client, self.registry)
                except _crypto.AuthenticationError as error:
                    found[client] = str(error)
        if verb == "assent" and self.signatures in replies:
            statement = context.sum_digest(
                self._transcript(server), server.state[self.partners].tolist(), server.state[self.survivors].tolist()
            )
            for client, signature in zip(replies.clients, _rows(replies[self.signatures])):
                if not _crypto.verify(self.registry.of(client), signature, statement):
                    found[client] = "its signature is invalid, or for another sum"
        return found

    def _transcript(self, server: Server) -> bytes:
        return self._context(server).transcript(_bundles(server.state[self.clients], server.state[self.bundles]))

    def back(self, server: Server, replies: AggregatedReplies, expected: Schema) -> AggregatedReplies:
        """Remove the masks from the sum, and decode the sum as the method's aggregated replies.

        Raises:
            NoUsableReply: a secret recovered from the disclosed shares does not match the key or digest that its
                client announced.
        """
        state = server.state
        shares: Tensor = state[self.shares]
        disclosed = zip(state[self.openers].tolist()[: self.threshold], shares)
        survivors: list[int] = state[self.survivors].tolist()
        partners: list[int] = state[self.partners].tolist()
        total = replies[self.masked].clone().cpu()
        unmask(
            total, _bundles(state[self.clients], state[self.bundles]), self._transcript(server), partners, survivors,
            {client: _rows(rows) for client, rows in disclosed},
        )  # fmt: skip
        layout = ReplyLayout.from_json(state[self.layout])
        server.notes["secure_sum"] = {"clients": len(survivors), "recovered": len(partners) - len(survivors)}
        for entry in (
            self.clients, self.bundles, self.partners, self.boxes, self.survivors, self.signers, self.signatures,
            self.openers, self.shares,
        ):  # fmt: skip
            del state[entry]
        return layout.decode(total.to(replies[self.masked].device), survivors, expected)


def require_sums(method: Method) -> None:
    """Raise PrivacyError for a method that needs the replies of single clients; the message names the part.

    `ReplyLayout.from_schema` checks the aggregation rules at the start of a run.
    """
    name = type(method).__name__
    if method.draws_clients:
        raise PrivacyError(
            f"{name} draws its clients in secret, and may draw none; the clients of a secure sum know each other: use "
            "only one of the two"
        )
    if part := query_sender(method):
        raise PrivacyError(
            f"{part} sends a request to every client before round 1, and each reply would be readable: remove it"
        )
    if isinstance(method, FedAvg) and len(method.networks.names) > 1:
        raise PrivacyError(
            "clients with several architectures send different replies, which would reveal their architecture: use one "
            "network"
        )
    if part := reply_reader(method):
        raise PrivacyError(
            f"{part} reads single replies on the server (read_reply), but only their sum is known: remove it"
        )


def _bytes(rows: list[bytes]) -> Tensor:
    """Return byte strings of equal length as the rows of a tensor, uint8 [rows, bytes]."""
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), -1)


def _rows(tensor: Tensor) -> list[bytes]:
    """Return the rows of a tensor, uint8 [rows, bytes], as byte strings."""
    return [bytes(row.tolist()) for row in tensor]


def _bundles(clients: Tensor, raw: Tensor) -> dict[int, KeyBundle]:
    return {client: KeyBundle(row) for client, row in zip(clients.tolist(), _rows(raw))}
