"""Tests after a round: the global models on the global test set, and clients on their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from distillkit.sets import LabeledImages, StoredImages
from fl.aggregation import BadReply, check_reply
from fl.engine import history
from fl.engine._devices import placed
from fl.engine._dispatch import Dispatcher
from fl.engine._transport import BundledExchange, ClientRequest, ClientResult
from fl.message import Message, payload_bytes
from fl.method import evaluation_batch_size
from fl.participants import Server
from fl.task import clients_accuracy

__all__ = ["Tests", "on_server"]


def on_server(dispatcher: Dispatcher, test: LabeledImages | StoredImages | None) -> dict[str, Any]:
    """Metrics of the global models on the global test set, for the round's row of the history.

    Args:
        dispatcher: knows the method, the server and where its work runs.
        test: the test set, of which a stored one is read piece by piece; `accuracy` and `loss` are None without one.
    """
    method, server = dispatcher.method, dispatcher.server

    def work() -> dict[str, Tensor]:
        if test is None:
            return {}
        models = method.predictors(server)
        found = [{name: p.sums(part, server.task) for name, p in models.items()} for part in _components(test, server)]
        return {name: sum((sums[name] for sums in found[1:]), found[0][name]) for name in models}

    return {"accuracy": None, "loss": None, **history.global_metrics(dispatcher.thread.run(work), server.task)}


def _components(test: LabeledImages | StoredImages, server: Server) -> Iterator[LabeledImages]:
    """A set that is in memory as one; of a stored one what goes through a network at once, so that no bit differs."""
    if isinstance(test, StoredImages):
        count = evaluation_batch_size(test.shape, server.device)
        for start in range(0, len(test), count):
            yield placed(test.read(slice(start, start + count)), server.device)
    else:
        yield test


class Tests:
    """The tests of clients on their own images after one round, asked for at its end or with the next round's messages.

    Args:
        dispatcher: asks them.
        server: as it was after the round.
        evaluate: which clients: "drawn", "all", "none" or numbers.
        row: of that round in the history, if it is still open.

    Attributes:
        server: as given.
        numbers: of these clients.
        resent: bytes of kept entries that travelled once more.
        over: whether all have been asked.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        server: Server,
        evaluate: str | Sequence[int],
        row: Mapping[str, Any] | None = None,
    ) -> None:
        panel = {"drawn": server.drawn, "all": range(server.clients), "none": []}
        self.server, self.numbers = server, panel[evaluate] if isinstance(evaluate, str) else evaluate
        self.resent, self.over, self._post, self._row = 0, False, dispatcher, row or {}
        self._accuracies: dict[int, list[tuple[str, float]]] = {}
        self._failed: dict[int, str] = {}
        self._down = self._up = self._spared = 0

    @classmethod
    def after(cls, dispatcher: Dispatcher, row: Mapping[str, Any], evaluate: str | Sequence[int]) -> Tests:
        """Those that belong to a `row` of the history that is still open; `dispatcher` and `evaluate` as above."""
        return cls(dispatcher, replace(dispatcher.server, round=row["round"], drawn=row["drawn"]), evaluate, row)

    def bundled(self) -> BundledExchange:
        """The exchange in which they are asked for."""
        return self._post.bundled(self.server, self.numbers, self.take)

    def exchange(self) -> None:
        """Ask for them now."""
        if self.numbers:
            self.bundled().run_first(self._post.transport)

    def take(self, answer: ClientResult, request: ClientRequest | None) -> None:
        """Check and count one client's `answer` to its `request`."""
        self.resent += answer.resent
        if answer.absent:
            return
        reason, found = answer.error, Message()
        if reason is None:
            reason, found = self._checked(answer.client, answer.reply)
        if reason is not None:
            self._failed[answer.client] = reason
            return
        groups = [group for _, group in found.items() if isinstance(group, dict)]
        sums = [pair for group in groups for pair in group.items()]
        self._accuracies[answer.client] = [(name, self.server.task.metrics(s)["accuracy"]) for name, s in sums]
        self._down += sum(self._post.weight(request, answer.client).values())
        self._up += sum(payload_bytes(found).values())
        self._spared += answer.spared
        self._post.known.update(answer.client, request)

    def completed(self) -> dict[str, Any]:
        """The row that was open, with what came of them."""
        resent = self._row.get("bytes_resent", 0) + self.resent
        return history.with_tests(self._row, self.found()) | ({"bytes_resent": resent} if resent else {})

    def found(self) -> dict[str, Any]:
        """What came of them, for the round's row of the history.

        Returns:
            Mean, std and worst tenth of the clients' accuracies (`accuracy_clients`, `accuracy_personal`), bytes, and
            why clients failed.
        """
        accuracies: dict[str, list[float]] = {}
        for client in self.numbers:
            for name, accuracy in self._accuracies.get(client, []):
                accuracies.setdefault(name, []).append(accuracy)
        row: dict[str, Any] = {}
        for name, values in accuracies.items():
            row["accuracy_clients" if name == "global" else f"accuracy_{name}"] = clients_accuracy(values)
        if self._accuracies:
            row |= {"bytes_down_evaluation": self._down, "bytes_up_evaluation": self._up}
        if self._spared:
            row["bytes_spared"] = self._spared
        if self._failed:
            row["failed_evaluation"] = {str(k): self._failed[k] for k in self.numbers if k in self._failed}
        return row

    def _checked(self, number: int, answer: Message | None) -> tuple[str | None, Message]:
        """Why a client's answer cannot be used, if so; and the answer, empty if there was nothing to test."""
        dispatcher, server = self._post, self.server

        def work() -> tuple[str | None, Message]:
            schema = dispatcher.method.expect_evaluation(server, number)
            try:
                if answer is None or (isinstance(answer, Message) and not len(answer)):
                    return None, Message()
                found = check_reply(placed(answer, server.device), dispatcher.entries, schema)
                for _, group in found.items():
                    if not isinstance(group, dict):
                        raise BadReply(
                            f"a test's results must be groups of the task's sums, name -> `LabelTask.sums`, got "
                            f"{type(group).__name__}"
                        )
                    for sums in group.values():
                        server.task.check_sums(sums)
            except Exception as error:  # what came is anything: however it fails, it is this answer that failed
                return str(error)[:300], Message()
            return None, found

        return dispatcher.thread.run(work)
