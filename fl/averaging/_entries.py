"""Entries of weight averaging: the values that are sent, and the values that server and clients keep."""

from __future__ import annotations

from typing import ClassVar

from fl.message import Entry, Tensors

__all__ = ["Entries"]


class Entries:
    """Entries of `FedAvg`'s messages, server state and client memory. Code refers to them as `FedAvg.update` etc.

    Attributes:
        model: parameters and buffers of the global models; sent to clients, and kept in the server's state.
        samples: weight of a reply in the mean.
        update: trained minus received value of every shared parameter; averaged with the weights `samples`.
        buffers: float buffers (batch-norm statistics) with the client's values after training.
        counters: integer buffers.
        last: a client's memory of its last trained state, for add-ons with `needs_previous`.
        own: a client's memory of the parameters and buffers that are never sent.
        moments: a client's memory of its optimizer's state, with `ClientOptimizer(state="client")`.
        tested: results of a client's test, by model; see `LabelTask.sums`.
        key: prefix of the entries' keys.
        written: name of the class by which code refers to the entries.
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
