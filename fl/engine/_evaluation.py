"""Evaluation after a round: global models on the global test set, and clients' models on their own test images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from distillkit.sets import LabeledImages, StoredImages
from fl.engine import history
from fl.engine._contract import checked_models
from fl.engine._devices import placed
from fl.engine._exchange import Exchanger
from fl.engine._round_stats import RoundStats
from fl.message import payload_bytes
from fl.method import evaluation_batch_size
from fl.participants import Server
from fl.task import clients_accuracy


def evaluate_global(exchanger: Exchanger, test: LabeledImages | StoredImages | None) -> dict[str, Any]:
    """Evaluate the global models on the global test set, and return the metrics as columns of the history."""
    method, server = exchanger.method, exchanger.server

    def work() -> dict[str, Tensor]:
        if test is None:
            return {}
        models = checked_models(method, server)
        found = [{name: p.sums(part, server.task) for name, p in models.items()} for part in _parts(test, server)]
        return {name: sum((sums[name] for sums in found[1:]), found[0][name]) for name in models}

    return {"accuracy": None, "loss": None, **history.global_metrics(exchanger.thread.run(work), server.task)}


def _parts(test: LabeledImages | StoredImages, server: Server) -> Iterator[LabeledImages]:
    """Yield a test set in parts that fit into memory.

    A set in memory is yielded as a whole. A set in a file is read and yielded in parts of the size of one evaluation
    batch. The metrics are bit-identical in both cases.
    """
    if isinstance(test, StoredImages):
        count = evaluation_batch_size(test.shape, server.device)
        for start in range(0, len(test), count):
            yield placed(test.read(slice(start, start + count)), server.device)
    else:
        yield test


def evaluate_clients(exchanger: Exchanger, evaluate: str | Sequence[int], drawn: Sequence[int]) -> dict[str, Any]:
    """Evaluate clients on their own test images after a round, and return the results as columns of the history."""
    server, down, up = exchanger.server, 0, 0
    panel = {"drawn": drawn, "all": range(server.clients), "none": []}
    clients = panel[evaluate] if isinstance(evaluate, str) else evaluate
    accuracies: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for one in exchanger.replies("evaluate", clients, RoundStats()) if clients else ():
        if one.reason is not None:
            failed[str(one.client)] = one.reason
            continue
        for _, group in one.message.items():
            for name, sums in group.items() if isinstance(group, dict) else ():
                accuracies.setdefault(name, []).append(server.task.metrics(sums)["accuracy"])
        down += sum(exchanger.request_sizes(one).values())
        up += sum(payload_bytes(one.message).values())
        exchanger.accept(one)
    row: dict[str, Any] = {
        "accuracy_clients" if name == "global" else f"accuracy_{name}": clients_accuracy(values)
        for name, values in accuracies.items()
    }
    row |= {"bytes_down_evaluation": down, "bytes_up_evaluation": up} if down else {}
    return row | ({"failed_evaluation": failed} if failed else {})
