"""Server app."""

from __future__ import annotations

from typing import Any

from flwr.serverapp import ServerApp

from fl.deploy.flower import ConnectionOptions, serve
from flower_app.images import test_set
from flower_app.methods import method_of

app = ServerApp()


@app.main()
def main(grid: Any, context: Any) -> None:
    """Run the method of the run config, or resume a run that was stopped before its last round."""
    config = context.run_config
    timeouts = ConnectionOptions(
        connect_timeout=config["connect-timeout"], reply_timeout=config["reply-timeout"]
    )  # fmt: skip
    run = serve(
        grid, method_of(config), rounds=config["rounds"], test=test_set(config), out=config["out"], resume=True,
        connection=timeouts,
    )  # fmt: skip
    print(run, flush=True)
