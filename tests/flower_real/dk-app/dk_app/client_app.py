"""The app of every node: answers with the method that the message names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp

from dk_app.settings import METHODS, load_client
from fl.engine.flower import reply_to

app = ClientApp()


@app.query("hello")
@app.query("job")
@app.train("job")
def answer(message: Any, context: Any) -> Any:
    """Answer one message."""
    method = METHODS[message.content.pop("method")["name"]]()
    partition, partitions = context.node_config["partition-id"], context.node_config["num-partitions"]
    folder = Path(context.run_config["out"]) / "nodes" / str(partition)
    return reply_to(message, context, method, lambda partition: load_client(partition, partitions), folder=folder)
