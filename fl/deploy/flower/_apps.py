"""The two apps that Flower runs: the server app, and the client app on every node."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distillkit._utils import check
from fl.deploy.flower._grid import ConnectionOptions, GridTransport
from fl.deploy.flower._messages import MAX_MESSAGE_BYTES, GridConnection, flower, to_records
from fl.deploy.flower._node import LoadClient, Node
from fl.deploy.flower._node_registry import NodeRegistry
from fl.engine._config import RunConfig
from fl.engine._runner import execute
from fl.engine.run import Run
from fl.method import Method, require_method
from fl.task import LabelTask


@dataclass(frozen=True, kw_only=True)
class FlowerConfig(RunConfig):
    """Options of `serve` and `server_app`: those of `fl.simulate` except `workers` and `progress`, and the connection.

    Args:
        clients: number of clients. None: the number of partitions in the Flower configs of the nodes
            (`num-partitions`).
        connection: timeouts and limits of the connection to the nodes.
    """

    clients: int | None = None
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)


def client_app(
    method: Method,
    load_client: LoadClient,
    *,
    folder: str | Path,
    task: LabelTask | None = None,
    device: str = "cpu",
    policy: str | Path | None = None,
    code: str | Path | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Any:
    """Create the Flower app of a node, which runs the requests of a `server_app` on the data of its partition.

    Enter this app in your project's pyproject.toml (`clientapp = "package.client_app:app"`). The value `partition-id`
    in the node config is the index of the node's client, and `num-partitions` is the number of clients. In a
    simulation, Flower sets both values.

    Args:
        method: the same method as in the server app. A node with a different method is refused before round 1.
        load_client: function that takes the partition index and returns the client's data. It may return anything that
            `fl.simulate` accepts as one client (such as a `LabeledImages`, a `ClientData` or a `Dataset`), the path of
            a folder of images, a `Split`, an `Allocation` (result of a task's `assign()`), or a table of flwr-datasets.
            docs/flower.md lists all forms. The function is called for every message, because in a deployment every
            message starts a new process.
        folder: path of the node's folder, which contains the node's secret key, the values that the client keeps
            between rounds, cached message entries, and the privacy ledger of the client's data. The folder must persist
            between messages. Of the files in this folder, only lines of the ledger are ever sent to the server.
        task: label task, which must be the server app's task; None: one class per image.
        device: device on which the client computes.
        policy: path of the file with the policy of the node's owner (see `read_policy`), which is read for every
            message. None: every request is allowed, but private releases are still charged to the ledger.
        code: folder of the app's code, `Path(__file__).parent`. You need this option only if the policy contains the
            hash of the code.
        max_message_bytes: size limit of a received message in bytes; larger messages are refused and not read.

    Returns:
        A `flwr.clientapp.ClientApp`.

    Raises:
        MissingFlower: Flower is not installed.
        TypeError, ValueError: an argument is not valid, or the file `policy` (limits that the node's owner sets)
            cannot be used.
    """
    node = Node(
        method, load_client, folder=folder, task=task, device=device, policy=policy, code=code,
        max_message_bytes=max_message_bytes,
    )  # fmt: skip
    app = flower("clientapp").ClientApp()

    def answer(message: Any, context: Any) -> Any:
        return _reply(node, message, context)

    app.query("node")(answer)
    app.query("job")(answer)
    app.train("job")(answer)
    for register in (app.train, app.evaluate, app.query):
        register()(_refuse_other_server)
    return app


def reply_to(message: Any, context: Any, method: Method, load_client: LoadClient, **options: Any) -> Any:
    """Return the reply to one message of the server, for use in a client app that you write yourself.

    The ready-made alternative is `client_app`.

    Use this function if the method or the location of the data comes from Flower's `context.run_config` and
    `context.node_config`. Register the function that calls `reply_to` for the message types "query.node", "query.job"
    and "train.job".

    Args:
        message: the message, an argument with which Flower calls the app.
        context: Flower's context, the other argument with which Flower calls the app.
        method: the method of the server app; see `client_app`.
        load_client: function that loads the client's data; see `client_app`.
        **options: options of `client_app`; `folder` is required.

    Returns:
        The `flwr.app.Message` to return. A failure of the client becomes a reply with an error.

    Raises:
        MissingFlower: Flower is not installed.
        TypeError, ValueError: an argument is not valid, or the file `policy` (limits that the node's owner sets)
            cannot be used.
    """
    return _reply(Node(method, load_client, **options), message, context)


def _refuse_other_server(message: Any, context: Any) -> Any:
    """Raise an error for a message from a server app of another library. Flower sends the error back to that server."""
    raise RuntimeError(
        f"this client app was made with distillkit, and got a {message.metadata.message_type!r} message of another "
        "server app: make the server app with server_app or serve of fl.deploy.flower"
    )


def _reply(node: Node, message: Any, context: Any) -> Any:
    reply = flower("app").Message
    for name, value, attribute in (("message", message, "metadata"), ("context", context, "node_config")):
        if not hasattr(value, attribute):
            raise TypeError(f"{name} must be the {name} that Flower passes to the app, got {type(value).__name__}")
    config = dict(context.node_config)
    if message.metadata.message_type == "query.node":
        parts = node.handle_query(message.content, config)
    else:
        parts = node.handle_job(message.content, config, message.metadata.created_at)
    return reply(to_records(parts), reply_to=message)


def serve(grid: Any, method: Method, **options: Any) -> Run:
    """Run a federated method on Flower's nodes, from a server app that you write yourself.

    The ready-made alternative is `server_app`. The function waits until the nodes of all clients have connected, and
    then runs the same rounds as `fl.simulate`, with the same history and files. On equal machines, the results are
    bitwise equal to those of `fl.simulate`, for any order of the replies. Pass `resume=True` to continue the run in
    the folder `out` (a field of `FlowerConfig`), even if it was started in another run of Flower.

    Args:
        grid: Flower's grid, an argument of the server app's main function.
        method: the method to run.
        **options: fields of `FlowerConfig`, which include most options of `fl.simulate`; `rounds` is required.

    Raises:
        IncompatibleNode: a node does not match the server; the message names the node and the difference.
        NoUsableReply: nodes did not connect in time, or a round has fewer usable replies than `min_replies`.
        MissingFlower: Flower is not installed.
        TypeError, ValueError: an argument is not valid.
        Exception: any other error that `fl.simulate` raises.
    """
    method, config = require_method(method), FlowerConfig(**options)
    if config.clients is not None:
        check.positive_int(config.clients, "clients")
    limits, task = config.connection, config.task
    flower("app")
    connection = GridConnection(grid, limits.poll_interval, limits.max_message_bytes)
    registry = NodeRegistry(method, task)
    registry.wait_for_all(connection, config.clients, limits.connect_timeout)
    transport = GridTransport(connection, registry, limits, registry.common_space(task))
    return execute(method, config, transport, progress=False)


def server_app(method: Method, **options: Any) -> Any:
    """Create the Flower app of the server, which runs the rounds of a method.

    `client_app` creates the app of the nodes. Enter the server's app in your project's pyproject.toml
    (`serverapp = "package.server_app:app"`). The results are written to the folder `out`, one of the options.
    If the app fails, `flwr list --format json` shows Flower's run as failed, but the exit status of `flwr run` does not
    report the failure.

    Args:
        method: the method to run.
        **options: fields of `FlowerConfig`, which include most options of `fl.simulate`; `rounds` is required.

    Returns:
        A `flwr.serverapp.ServerApp`.

    Raises:
        MissingFlower: Flower is not installed.
        TypeError: `method` is not a `Method`. Options are only checked when the app runs.
    """
    require_method(method)
    FlowerConfig(**options)  # names unknown options before the app runs
    app = flower("serverapp").ServerApp()

    def main(grid: Any, context: Any) -> None:
        serve(grid, method, **options)

    app.main()(main)
    return app
