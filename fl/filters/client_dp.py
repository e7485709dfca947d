"""Differential privacy for whole clients, as a filter for methods that average updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distillkit._utils.options import CheckedOptions, Fraction, NonNegative, Positive, Rate
from distillkit._utils.user_warnings import warn
from distillkit.privacy import ADD_OR_REMOVE_CLIENT, ALL_CLIENTS, Event, Ledger, NotAccountable, PrivacyError, as_secret
from distillkit.privacy.accounting._ranges import LEAST_CLIP, MOST_CLIP, check_clip, check_sigma
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging.fedavg import FedAvg
from fl.filters._boundable import require_shapes, require_sums
from fl.filters.filter import Filter
from fl.message import Entry, Message, Tensors, Value
from fl.method import Method
from fl.participants import Client, Server

_MARGIN = 1 - 2.0**-22
"""Factor that keeps float32 rounding from making a clipped update longer than its clip."""


@dataclass(frozen=True)
class Adaptive(CheckedOptions):
    """Adaptation of the clip norms to a quantile of the updates' norms (Andrew et al., NeurIPS 2021, Algorithm 1).

    With every update, a client sends one bit, which states whether the norm of its update is at most the clip norm C.
    From the noised sum of the bits, the server computes b, the share of updates with a norm of at most C. It then sets
    C <- C exp(-step (b - quantile)).

    Args:
        quantile: gamma, the target quantile of the updates' norms, in [0, 1]; 0.5 is the median.
        step: eta_C, the rate at which the clip norms change, above 0.
        sigma: sigma_b, the standard deviation of the noise on the sum of the bits. Default: the expected number of
            clients in a round, divided by 20, as in the paper. It must exceed sqrt(k) / 2 times `ClientDP.sigma`, where
            k is the number of entries in `ClientDP.clip` (usually 1). Otherwise the bits alone would use the privacy
            loss that `ClientDP.sigma` allows.
    """

    quantile: Fraction = 0.5
    step: Positive = 0.2
    sigma: Positive | None = None


@dataclass(frozen=True)
class ClientDP(Filter):
    """DP-FedAvg (McMahan et al., "Learning differentially private recurrent language models", ICLR 2018).

    In each round, every client takes part with probability q, independently and in secret. The client scales its
    update, as one vector, to a norm of at most C. The server sums the updates, adds N(0, (sigma C)^2) to every value of
    the sum, and divides by q N, where N is the number of clients. It does not divide by the number of replies, which is
    private. If a reply has several clipped entries with clip norms C_e, then C is sqrt(sum C_e^2). The same noise is
    added in rounds without clients, and in rounds with lost, failed or NaN replies. Noised sums are rounded to a public
    grid (`privacy.Secret.add_noise`). Without a seed for private draws,
    the noise comes from the operating system's random number generator.

    **Guarantee.** The models of all rounds, and everything derived from them, are differentially private with the
    ledger's epsilon and delta with respect to adding or removing one client with all of its data. The server and the
    network connection must be trusted, because individual updates are clipped but not noised. The run's folder is not
    covered: it holds fingerprints of the data, message sizes, the number of failed clients, timings, the memories of
    the drawn clients and, if you request a transcript, every message. Publish the model, not the folder.

    Deviations. Every client has the same weight, and `FedAvg(weights="uniform")` is required; the paper's weight of
    client k is min(n_k / n, 1), where n_k is its number of examples and n a constant. Of the paper's variants, this
    class implements flat clipping (one clip norm for the whole update) and the estimator with a fixed denominator, q N.

    Args:
        sigma: noise multiplier, that is, the noise's standard deviation divided by C, at least 0. To reach a target
            epsilon, use `distillkit.privacy.plan_noise(..., rate=q, count=rounds).sigma`. With 0, there is no privacy
            guarantee.
        rate: q in (0, 1], the probability with which a client takes part in a round.
        clip: clip norm C of the entry `FedAvg.update`, the client's weight change; or a mapping from each entry of a
            reply to its clip norm.
        adaptive: an `Adaptive(...)`, which adapts the clip norms from round to round, starting from `clip`. Clients
            then also send bits, which state whether the norm of an update is within the clip norm. The privacy loss
            that `sigma` allows covers the updates and the bits. None: the clip norms are constant.

    Attributes:
        clips: initial clip norm of each entry, in the order of the entries' keys.

    Raises:
        PrivacyError: a reply has an entry that is not clipped, or the method cannot be protected for another reason.
            The error is raised when `Filtered` is built or the run starts, and names the entry.
        TypeError, ValueError: an option has a wrong type or is out of range.
        BudgetExhausted: the next round would exceed the ledger's budget. The error is raised during the run.
    """

    sigma: NonNegative
    rate: Rate
    clip: float | Mapping[Entry[Any], float] = field(repr=False)
    adaptive: Adaptive | None = None
    clips: dict[Entry[Any], float] = field(init=False)

    norms = Entry[Tensor]("first")
    within = Entry[Tensor]("sum")

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_sigma(self.sigma) == 0:
            warn("ClientDP(sigma=0) adds no noise: nothing is guaranteed, and the history's epsilon is None")
        given = self.clip if isinstance(self.clip, Mapping) else {FedAvg.update: self.clip}
        wrong = [e for e in given if not isinstance(e, Entry)]
        if wrong:
            raise TypeError(f"clip must map entries, as FedAvg.update, to their norms, got {wrong[0]!r}")
        if self.adaptive is not None and not isinstance(self.adaptive, Adaptive):
            raise TypeError(f"adaptive must be an Adaptive(...), got {type(self.adaptive).__name__}")
        clips = {e: check_clip(c, f"the clip of {e.key}") for e, c in given.items()}
        if not clips:
            raise ValueError("clip must hold at least one entry, got none")
        object.__setattr__(self, "clips", dict(sorted(clips.items(), key=lambda pair: pair[0].key)))
        if self.adaptive is not None and self.adaptive.sigma is not None:
            self._split(0)

    @property
    def private(self) -> bool:
        """Always True, because the filter charges a ledger in every round."""
        return True

    def _split(self, clients: int) -> tuple[float, float]:
        """Return the noise multiplier of the updates, and the standard deviation of the noise on the sum of bits.

        The privacy loss that `sigma` allows is divided as in theorem 1 of Andrew et al. Without bits, the second result
        is 0.
        """
        sigma = float(self.sigma)  # half precision would round the noise
        if self.adaptive is None or sigma == 0:
            return sigma, 0.0
        bits = float(self.adaptive.sigma or self.rate * clients / 20)
        left = sigma**-2 - len(self.clips) * (2 * bits) ** -2  # a bit is +-1/2
        if left <= 0:
            minimum = sigma * math.sqrt(len(self.clips)) / 2
            raise ValueError(
                f"Adaptive(sigma=...) must be above {minimum:g}, because sigma is {sigma:g}; got {bits:g}: "
                "give a larger one"
            )
        return left**-0.5, bits

    def check(self, method: Method) -> None:
        """Refuse a `method` whose server needs more from the replies than sums of clipped values."""
        require_sums(method, self.clips)

    def start(self, server: Server, expected: Schema, entries: Mapping[str, Entry[Any]]) -> None:
        """Check the replies' schema and the delta of the run's ledger. Store the initial values of adaptive clip norms.

        Raises:
            PrivacyError: a reply contains an entry that is not clipped or has no fixed shape.
            NotAccountable: the ledger's delta is at least 1 / (number of clients).
            ValueError: `Adaptive.sigma` is too small for `ClientDP.sigma`; see `Adaptive` for the minimum.
        """
        require_shapes(expected, self.clips)
        self._ledger(server).assume("ClientDP")
        if self._ledger(server).delta >= 1 / server.clients:
            raise NotAccountable(
                f"delta must be below one over the number of clients, 1/{server.clients}, got "
                f"{self._ledger(server).delta:g}; give the ledger a smaller one"
            )
        self._split(server.clients)
        if self.adaptive is not None:
            server.state[self.norms] = torch.tensor(list(self.clips.values()), dtype=torch.float64)

    def _ledger(self, server: Server) -> Ledger:
        if server.ledger is None:
            raise PrivacyError("ClientDP needs a server with a ledger: run it with `simulate`, which gives it one")
        return server.ledger

    def _event(self, server: Server) -> Event:
        seeded, when = as_secret(server.secret).seeded, server.round
        return Event(
            "client_dp", self.sigma, self.rate, 1, ALL_CLIENTS, when, relation=ADD_OR_REMOVE_CLIENT, seeded=seeded
        )

    def draw(self, server: Server) -> list[int]:
        """Return the clients of this round. Every client is drawn with probability `rate`, independently and in secret.

        Raises:
            BudgetExhausted: this round would exceed the ledger's budget.
        """
        self._ledger(server).check(self._event(server))
        return list(server.secret.poisson(server.clients, self.rate).tolist())

    def send(self, server: Server, client: int, message: Message) -> None:
        """Send this round's clip norms to the client, if they are adaptive."""
        if self.adaptive is not None:
            message[self.norms] = server.state[self.norms]

    def expect(self, server: Server, client: int, schema: Schema) -> None:
        """Change the schema so that it requires every client's weight in an average to be exactly 1.

        With adaptive clip norms, every reply must also contain one number for each clipped entry: 1/2 if the entry's
        norm was within the clip norm, and -1/2 otherwise.
        """
        for entry in self.clips:
            if entry.by is not None and entry.by.key in schema:
                schema[entry.by.key] = EntrySpec(1.0, minimum=1.0, maximum=1.0)
        if self.adaptive is not None:
            schema[self.within.key] = EntrySpec(server.state[self.norms], minimum=-0.5, maximum=0.5)

    def out(self, client: Client, message: Message, reply: Message) -> Message:
        """Return a reply with only the entries in `clips`, scaled to at most their clip norms, and with a weight of 1.

        With this weight, the reply does not reveal the client's number of images. With adaptive clip norms, the reply
        also has one bit for each entry in `clips`: 1/2 if the entry's norm before scaling was within the clip norm, and
        -1/2 otherwise.
        """
        norms = message[self.norms].tolist() if self.adaptive is not None else self.clips.values()
        sent, within = Message(), torch.full((len(self.clips),), 0.5, dtype=torch.float64)
        for i, (entry, most) in enumerate(zip(self.clips, norms)):
            if entry in reply:
                sent[entry], fits = _clipped(reply[entry], most)
                within[i] = 0.5 if fits else -0.5
            if entry.by is not None:
                sent[entry.by] = 1.0
        if self.adaptive is not None:
            sent[self.within] = within
        return sent

    def back(self, server: Server, replies: AggregatedReplies, expected: Schema) -> AggregatedReplies:
        """Charge the ledger for this round, and return the noised aggregate of every clipped entry.

        Noise N(0, (sigma C)^2) is added to the sum over the clients. Here, sigma is the noise multiplier, which is
        larger than the option `sigma` if the clip norms are adaptive. C is the norm to which a client's reply is
        clipped. If several entries are clipped, each to its norm C_e, C is sqrt(sum C_e^2). The noised sum of an entry
        with the aggregation rule `mean` (see `Entry`) is divided by the expected number of clients. A tensor that no
        client sent consists of noise alone. The method gets only these noised tensors.
        """
        self._ledger(server).spend(self._event(server))
        count = self.rate * server.clients  # expected number of clients in a round, which is public
        update_noise, bit_noise = self._split(server.clients)
        norms = server.state.get(self.norms, torch.tensor(list(self.clips.values()), dtype=torch.float64))
        server.notes["clip_norm"] = dict(zip((e.key for e in self.clips), norms.tolist()))
        values, sums, std = Message(), dict[str, Any](), update_noise * float(norms.norm())
        for entry in self.clips:
            wanted = expected[entry.key].value
            total = _group(replies.sum(entry)) if entry in replies else {}
            zeros = {n: torch.zeros_like(t) for n, t in _group(wanted).items()}
            noised = {n: server.secret.add_noise(total.get(n, t), std) for n, t in zeros.items()}
            divisor = 1.0 if entry.rule == "sum" else count
            values[entry] = _like({n: t / divisor for n, t in noised.items()}, wanted)
            sums[entry.key] = noised if isinstance(wanted, dict) else noised[""]
            if entry.by is not None:
                values[entry.by] = count
        if self.adaptive is not None:
            share = 0.5 + server.secret.add_noise(replies.get(self.within, torch.zeros_like(norms)), bit_noise) / count
            norms = norms * (-self.adaptive.step * (share - self.adaptive.quantile)).exp()
            server.state[self.norms] = norms.clamp(LEAST_CLIP, MOST_CLIP)
        return AggregatedReplies(values, dict.fromkeys(sums, count), sums, [])


def _group(value: Value) -> Tensors:
    """Return a value as a dict of float64 tensors. A number or a single tensor gets the name ""."""
    if isinstance(value, dict):
        return {n: t.detach().double() for n, t in value.items()}
    return {"": value.detach().double() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)}


def _like(tensors: Tensors, value: Value) -> Any:
    """Convert a dict of float64 tensors to the type and dtypes of an entry's value. This reverses `_group`."""
    if isinstance(value, dict):
        return {n: t.to(value[n].dtype) for n, t in tensors.items()}
    return tensors[""].to(value.dtype) if isinstance(value, Tensor) else float(tensors[""])


def _clipped(value: Value, most: float) -> tuple[Any, bool]:
    """Return a value, scaled down to norm `most` if its norm is larger, and whether the value is unchanged.

    The norm is that of all numbers of the value, taken as one vector. A value that is not finite is replaced by zeros.
    """
    vector = _group(value)
    norm = math.sqrt(sum(float(t.square().sum()) for t in vector.values()))
    if norm <= most:
        return value, True
    finite = math.isfinite(norm)
    factor = most / norm * _MARGIN
    return _like({n: t * factor if finite else torch.zeros_like(t) for n, t in vector.items()}, value), False
