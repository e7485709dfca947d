"""Entries of weight averaging: what travels, and what server and clients keep."""

from __future__ import annotations

from typing import ClassVar

from fl.message import Entry, Tensors

__all__ = ["Entries"]


class Entries:
    """Entries of `FedAvg`'s messages, server state and client memory; read them as `FedAvg.update` etc.

    Attributes:
        model: the global model(s), parameters and buffers; sent down, and the server's state.
        samples: the weight of a reply.
        update: trained minus received, for every shared parameter; their mean is weighted by `samples`.
        buffers: float buffers (batch-norm statistics), as the client has them after training.
        counters: integer buffers.
        last: a client's memory of its last trained state, for add-ons with `needs_previous`.
        own: a client's memory of the parameters and buffers that never travel.
        moments: a client's memory of its optimiser's state, with `ClientOptimizer(state="client")`.
        tested: sums of a test, by model.
        key, written: prefix of the entries' keys, and the class through which code reads them.
    """

    key: ClassVar[str] = "FedAvg"
    written: ClassVar[str] = "FedAvg"
    model = Entry[Tensors]("first")
    samples = Entry[float]("sum")
    update = Entry[Tensors]("mean", by=samples)
    buffers = Entry[Tensors]("mean", by=samples)
    counters = Entry[Tensors]("max")
    last = Entry[Tensors]("first")
    own = Entry[Tensors]("first")
    moments = Entry[Tensors]("first")
    tested = Entry[Tensors]("sum")
