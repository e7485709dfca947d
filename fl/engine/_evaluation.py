"""Evaluation after a round: global models on the global test set, and clients' models on their own test images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from distillkit.sets import LabeledImages, StoredImages
from fl.engine import history
from fl.engine._contract import checked_models
from fl.engine._devices import placed
from fl.engine._dispatch import Dispatcher
from fl.engine._replies import validate
from fl.engine._transport import ClientRequest, ClientResult, Exchange
from fl.message import Message, payload_bytes
from fl.method import evaluation_batch_size
from fl.participants import Server
from fl.task import clients_accuracy

__all__ = ["ClientEvaluation", "evaluate_global"]


def evaluate_global(dispatcher: Dispatcher, test: LabeledImages | StoredImages | None) -> dict[str, Any]:
    """Evaluate the global models on the global test set, and return the metrics as columns of the history.

    Args:
        dispatcher: dispatcher of the run, which gives access to the method, the server and the server's thread.
        test: the test set; a `StoredImages` is read in parts. If it is None, the returned `accuracy` and `loss` are
            None, too.
    """
    method, server = dispatcher.method, dispatcher.server

    def work() -> dict[str, Tensor]:
        if test is None:
            return {}
        models = checked_models(method, server)
        found = [{name: p.sums(part, server.task) for name, p in models.items()} for part in _parts(test, server)]
        return {name: sum((sums[name] for sums in found[1:]), found[0][name]) for name in models}

    return {"accuracy": None, "loss": None, **history.global_metrics(dispatcher.thread.run(work), server.task)}


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


class ClientEvaluation:
    """Evaluation of clients on their own test images after one round.

    The evaluation requests are sent either at the end of the round, or together with the next round's first requests.
    In the second case, the round's row of the history stays open, that is, it lacks the evaluation results until then.

    Args:
        dispatcher: sender of the requests.
        server: the server with its state after the round.
        evaluate: clients to evaluate: "drawn" (those drawn in the round), "all", "none" or client indices.
        row: the round's row of the history if it is open; None if the requests are sent at the end of the round.

    Attributes:
        server: the argument `server`.
        clients: indices of the clients to evaluate.
        resent: number of bytes of message entries that were sent again, because clients no longer had them in their
            caches.
        over: whether the evaluation is complete.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        server: Server,
        evaluate: str | Sequence[int],
        row: Mapping[str, Any] | None = None,
    ) -> None:
        panel = {"drawn": server.drawn, "all": range(server.clients), "none": []}
        self.server, self.clients = server, panel[evaluate] if isinstance(evaluate, str) else evaluate
        self.resent, self.over, self._dispatcher, self._row = 0, False, dispatcher, row or {}
        self._accuracies: dict[int, list[tuple[str, float]]] = {}
        self._failed: dict[int, str] = {}
        self._down = self._up = self._bytes_spared = 0

    @classmethod
    def of_row(cls, dispatcher: Dispatcher, row: Mapping[str, Any], evaluate: str | Sequence[int]) -> ClientEvaluation:
        """Return an object that evaluates a completed round that was not evaluated yet.

        Args:
            dispatcher: sender of the requests.
            row: row of the last completed round in the history, without evaluation results.
            evaluate: clients to evaluate: "drawn" (those drawn in the round), "all", "none" or client indices.
        """
        return cls(dispatcher, replace(dispatcher.server, round=row["round"], drawn=row["drawn"]), evaluate, row)

    def exchange(self) -> Exchange:
        """Return an exchange that contains the evaluation requests. The caller sends it alone, or with another
        exchange.
        """
        return self._dispatcher.evaluation(self.server, self.clients, self._accumulate)

    def run(self) -> None:
        """Send the evaluation requests to the clients, and collect all results."""
        if self.clients:
            self.exchange().run_alone(self._dispatcher.transport)

    def _accumulate(self, result: ClientResult, request: ClientRequest | None) -> None:
        """Validate one client's evaluation result, and store its accuracies, or the reason why the client failed.

        The bytes of a valid result and of its request are added to the byte totals of this evaluation.

        Args:
            result: the client's result.
            request: the request to the client; None if no request was built.
        """
        self.resent += result.resent
        if result.absent:
            return
        reason, found = result.error, Message()
        if reason is None:
            work = partial(validate, self._dispatcher, self.server, "evaluate", result)
            reason, found = self._dispatcher.thread.run(work)
        if reason is not None:
            self._failed[result.client] = reason
            return
        groups = [group for _, group in found.items() if isinstance(group, dict)]
        sums = [pair for group in groups for pair in group.items()]
        self._accuracies[result.client] = [(name, self.server.task.metrics(s)["accuracy"]) for name, s in sums]
        self._down += sum(self._dispatcher.request_sizes(request, result.client).values())
        self._up += sum(payload_bytes(found).values())
        self._bytes_spared += result.bytes_spared
        self._dispatcher.cache_index.update(result.client, request)

    def completed_row(self) -> dict[str, Any]:
        """Return the round's row of the history, completed by the evaluation results."""
        resent = self._row.get("bytes_resent", 0) + self.resent
        return history.with_tests(self._row, self.results()) | ({"bytes_resent": resent} if resent else {})

    def results(self) -> dict[str, Any]:
        """Return the evaluation results as columns of the round's row of the history.

        Returns:
            Statistics of the clients' accuracies, under `accuracy_clients` for the global model and
            `accuracy_personal` for personal models; the bytes of the evaluation requests and replies; and the reasons
            why clients failed. Columns without values are left out.
        """
        accuracies: dict[str, list[float]] = {}
        for client in self.clients:
            for name, accuracy in self._accuracies.get(client, []):
                accuracies.setdefault(name, []).append(accuracy)
        row: dict[str, Any] = {}
        for name, values in accuracies.items():
            row["accuracy_clients" if name == "global" else f"accuracy_{name}"] = clients_accuracy(values)
        if self._accuracies:
            row |= {"bytes_down_evaluation": self._down, "bytes_up_evaluation": self._up}
        if self._bytes_spared:
            row["bytes_spared"] = self._bytes_spared
        if self._failed:
            row["failed_evaluation"] = {str(k): self._failed[k] for k in self.clients if k in self._failed}
        return row
