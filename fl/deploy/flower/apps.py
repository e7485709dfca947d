"""The two apps that Flower runs: one beside the server, one on every node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from distillkit._utils import check
from distillkit.privacy import Ledger
from distillkit.sets import Images, StoredImages
from fl.deploy.flower._handshake import Roll
from fl.deploy.flower._import import flower
from fl.deploy.flower._messages_in_flight import Mail
from fl.deploy.flower._node import LoadClient, Node
from fl.deploy.flower._node_discovery import Met, gather
from fl.deploy.flower._records import LARGEST, to_records
from fl.deploy.flower._transport import GridTransport, Terms
from fl.engine._backends import RunContext
from fl.engine._privacy_validation import remark_on
from fl.engine._runner import RunConfig, play
from fl.engine.run import Run
from fl.method import Method, require_method
from fl.task import LabelTask

__all__ = ["Options", "client_app", "reply_to", "serve", "server_app"]


class Options(TypedDict, total=False):
    """What `serve` and `server_app` take beside the method, each as in `fl.simulate`; `rounds` must be given."""

    rounds: int
    test: Images | StoredImages | None
    task: LabelTask | None
    server_data: Mapping[str, Images] | None
    participation: float | int
    min_replies: int
    evaluate: Literal["drawn", "all", "none"] | Sequence[int] | None
    seed: int
    ledger: Ledger | None
    secret: int | None
    server_threads: int
    device: str
    out: str | Path | None
    resume: bool
    transcript: bool
    notes: Mapping[str, Any] | None
    on_round: Callable[[dict[str, Any]], None] | None


def client_app(
    method: Method,
    load_client: LoadClient,
    *,
    folder: str | Path,
    task: LabelTask | None = None,
    device: str = "cpu",
    policy: str | Path | None = None,
    code: str | Path | None = None,
    largest_message: int = LARGEST,
) -> Any:
    """Flower's app of a node: does what a server app of the same method asks, with the data of its partition.

    Name it in the app's pyproject.toml (`clientapp = "package.client_app:app"`). Which client a node is stands in its
    node config, `partition-id` and `num-partitions`; in a simulation Flower sets both.

    Args:
        method: as the server app has it; nodes with another are refused when they say hello.
        load_client: called with the partition's number; gives what `fl.simulate` takes as one client: a
            `LabeledImages`, a `ClientData` of training and test images, a `Dataset`, a pair of images and labels, a
            `StoredImages`. Or the path of a folder of pictures, a `Split`, what a study's task deals, a table of
            flwr-datasets; docs/flower.md has them all. Called for every message, because on a real node every message
            is a new process.
        folder: where the node keeps what outlasts a message: its key, what its client remembers, bodies that the
            server sends once, and the ledger of its data. It must be there again for the next message. Nothing in it is
            sent, but for the ledger's lines.
        task: what the labels mean, as the server app has it; None: one class an image.
        device: where the client computes.
        policy: a file of what the node's owner allows, see `read_policy`; None: whatever the methods ask, all of it
            charged to the ledger. It is read for every message.
        code: the folder of the app's code, `Path(__file__).parent`, for a policy that pins it.
        largest_message: bytes of a message beyond which the node reads nothing of it, and says so.

    Returns:
        A `flwr.clientapp.ClientApp`.

    Raises:
        MissingFlower: Flower is not installed.
        TypeError, ValueError: bad arguments, or a policy that cannot be used.
    """
    node = Node(require_method(method), load_client, folder, task, device, policy, code, largest_message)
    app = flower("clientapp").ClientApp()

    def answer(message: Any, context: Any) -> Any:
        return _replied(node, message, context)

    app.query("hello")(answer)
    app.query("job")(answer)
    app.train("job")(answer)
    return app


def reply_to(
    message: Any,
    context: Any,
    method: Method,
    load_client: LoadClient,
    *,
    folder: str | Path,
    task: LabelTask | None = None,
    device: str = "cpu",
    policy: str | Path | None = None,
    code: str | Path | None = None,
    largest_message: int = LARGEST,
) -> Any:
    """Answer one message of the server, in a client app of one's own; see `client_app` for a ready one.

    For apps that read the method, or where a node's data lie, from what Flower tells them: `context.run_config` and
    `context.node_config`. Register the function that calls this for the types "query.hello", "query.job" and
    "train.job".

    Args:
        message, context: what Flower calls a client app's function with.
        method, load_client, folder, task, device, policy, code, largest_message: see `client_app`.

    Returns:
        The `flwr.app.Message` to return. Whatever fails while a client works is an answer that says so.

    Raises:
        MissingFlower: Flower is not installed.
        TypeError, ValueError: bad arguments, or a policy that cannot be used.
    """
    node = Node(require_method(method), load_client, folder, task, device, policy, code, largest_message)
    return _replied(node, message, context)


def _replied(node: Node, message: Any, context: Any) -> Any:
    config, letter = dict(context.node_config), flower("app").Message
    if message.metadata.message_type == "query.hello":
        parts = node.query(message.content, config)
    else:
        parts = node.answer(message.content, config, message.metadata.created_at)
    return letter(to_records(parts), reply_to=message)


def serve(
    grid: Any,
    method: Method,
    *,
    clients: int | None = None,
    wait: float = 300.0,
    deadline: float = 3600.0,
    at_once: int = 64,
    poll: float = 0.2,
    largest_message: int = LARGEST,
    defer_tests: bool = True,
    **options: Unpack[Options],
) -> Run:
    """Run a federated method over Flower's grid; for a server app of one's own, see `server_app` for a ready one.

    Waits until every partition's node has said hello, and plays the rounds as `fl.simulate` does: the same history, the
    same files, and on like machines the same bits, whatever the order in which nodes answer. A run in `out` goes on
    with `resume=True`, under another run of Flower too.

    Args:
        grid: Flower's, which the server app's main function is called with.
        method: what to run.
        clients: how many partitions there are; None: as many as the nodes say (`num-partitions`).
        wait: seconds in which all nodes must have come; and as many again in which, before a private run, they must
            have said what was charged to their data.
        deadline: seconds that a client has for an answer, from the making of its message on, by the clocks of both; so
            the time that it waits for its turn on its node counts. Then it is stopped, and is an error in the history.
        at_once: how many clients have a message at a time.
        poll: seconds between two looks for answers.
        largest_message: bytes of an answer beyond which nothing of it is read, and its client has failed. (Flower holds
            the answer by then; it has no limit of its own.)
        defer_tests: whether clients are tested (`evaluate`) with the next round's message, which saves every node a
            trip in every round. A round's row of the history then comes when the next round is committed, and the last
            one's at the end. Private methods, and those that draw their clients themselves, are tested at once.
        options: those of `fl.simulate`, see `Options`.

    Raises:
        Misfit: a node does not fit; it is named, with what differs.
        NoUsableReply: nodes have not come in time, or a round left too little.
        MissingFlower: Flower is not installed.
        TypeError, ValueError: bad arguments.
        Whatever else `fl.simulate` raises.
    """
    method = require_method(method)
    if clients is not None:
        check.positive_int(clients, "clients")
    for name, seconds in {"wait": wait, "deadline": deadline, "poll": poll}.items():
        check.real_number(seconds, name, above=0.0)
    check.positive_int(at_once, "at_once")
    check.positive_int(largest_message, "largest_message")
    flower("app")
    task = options.get("task")
    mail, roll, met = Mail(grid, poll, largest_message), Roll(method, task), Met()
    gather(mail, roll, met, clients, wait)
    first = roll.first(task)
    terms = Terms(first.num_classes, deadline, at_once, wait)
    plan = RunConfig(
        method=method, first=first, clients=len(roll.guests), progress=False, defer_tests=defer_tests, **options
    )

    def cohort(place: RunContext) -> GridTransport:
        return GridTransport(mail, roll, met, terms, place.ledger, place.memories)

    return play(plan, roll.fingerprint, cohort, remark_on)


def server_app(
    method: Method,
    *,
    clients: int | None = None,
    wait: float = 300.0,
    deadline: float = 3600.0,
    at_once: int = 64,
    poll: float = 0.2,
    largest_message: int = LARGEST,
    defer_tests: bool = True,
    **options: Unpack[Options],
) -> Any:
    """Flower's app of the server: plays a method with the nodes that run `client_app`.

    Name it in the app's pyproject.toml (`serverapp = "package.server_app:app"`). What the run finds lies in `out`; an
    app that fails ends Flower's run as failed, which `flwr list --format json` says, and not the exit status of
    `flwr run`.

    Args:
        method, clients, wait, deadline, at_once, poll, largest_message, defer_tests, options: see `serve`.

    Returns:
        A `flwr.serverapp.ServerApp`.

    Raises:
        MissingFlower: Flower is not installed.
        TypeError: no method; the other arguments are checked when the app runs.
    """
    require_method(method)
    app = flower("serverapp").ServerApp()

    def main(grid: Any, context: Any) -> None:
        serve(
            grid, method, clients=clients, wait=wait, deadline=deadline, at_once=at_once, poll=poll,
            largest_message=largest_message, defer_tests=defer_tests, **options,
        )  # fmt: skip

    app.main()(main)
    return app
