"""Client app, which runs the method that the message names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp

from dk_app.costs import SIZES, Echo, echo_client
from dk_app.settings import load_client, method_of
from fl.deploy.flower import reply_to

app = ClientApp()


@app.query("node")
@app.query("job")
@app.train("job")
def answer(message: Any, context: Any) -> Any:
    """Reply to one message."""
    name = message.content.pop("method")["name"]
    here, out = context.node_config, Path(context.run_config["out"])
    partition, partitions = here["partition-id"], here["num-partitions"]
    folder = here.get("folder", str(out / "nodes" / str(partition)))
    if name in SIZES:
        return reply_to(message, context, Echo(SIZES[name]), lambda partition: echo_client(), folder=folder)
    return reply_to(
        message, context, method_of(name, out, node=True), lambda partition: load_client(partition, partitions),
        folder=folder, policy=here.get("policy"), code=Path(__file__).parent,
    )  # fmt: skip


@app.train("bare")
def bare(message: Any, context: Any) -> Any:
    """Send a message back, without the adapter."""
    return Message(message.content, reply_to=message)
