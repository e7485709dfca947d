"""Client app, which runs on every node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp

from fl.deploy.flower import reply_to
from flower_app.images import load_client
from flower_app.methods import method_of

app = ClientApp()


@app.query("node")
@app.query("job")
@app.train("job")
def answer(message: Any, context: Any) -> Any:
    """Reply to one message of the server."""
    node, config = context.node_config, context.run_config
    return reply_to(
        message, context, method_of(config), lambda partition: load_client(partition, node, config),
        folder=node.get("folder", "runs/flower-node"), policy=node.get("policy"), code=Path(__file__).parent,
    )  # fmt: skip
