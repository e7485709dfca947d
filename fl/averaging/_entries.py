"""Declarations (`Entry`) of the values that `FedAvg` sends in messages, and keeps on the server and on clients."""

from __future__ import annotations

from typing import ClassVar

from fl.message import Entry, Tensors


class Entries:
    """Entries of `FedAvg`'s messages, server state and client memory.

    `FedAvg` inherits these attributes, for example as `FedAvg.update`.

    Attributes:
        model: parameters and buffers of the global models; sent to clients, and kept in the server's state.
        samples: weight of a client's reply in the mean over the clients.
        update: trained minus received value of every shared parameter. The server computes the mean of these values
            over the clients, weighted by `samples`.
        buffers: values of the float buffers (batch-norm statistics) after the client's training.
        counters: values of the integer buffers after the client's training, such as the batch count of batch norm.
        last: parameters and buffers after the client's last training, in its memory. They are kept only if an add-on
            reads them (`AddOn.needs_previous`).
        own: parameters and buffers that are never sent, in a client's memory.
        moments: state of the optimizer, in a client's memory, if `ClientOptimizer(state="client")` is used.
        tested: test results of a client's models, as returned by `LabelTask.sums`, under the names "global" and
            "personal".
        key: prefix of the entries' keys.
    """

    key: ClassVar[str] = "FedAvg"
    model = Entry[Tensors]("first")
    samples = Entry[float]("sum")
    update = Entry[Tensors]("mean", by=samples)
    buffers = Entry[Tensors]("mean", by=samples)
    counters = Entry[Tensors]("max")
    last = Entry[Tensors]("first")
    own = Entry[Tensors]("first")
    moments = Entry[Tensors]("first")
    tested = Entry[Tensors]("sum")
