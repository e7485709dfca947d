"""Run a federated method on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from distillkit._utils import check
from distillkit.privacy.validation._arguments import refuse_derived
from distillkit.sets import Images, StoredImages
from fl.engine._client_memory import MemoryStore
from fl.engine._client_runtime import ClientRuntime
from fl.engine._clients import ClientData, ClientRegistry
from fl.engine._config import SimulationConfig, options
from fl.engine._run_record import data_fingerprint
from fl.engine._runner import Deployment, execute
from fl.engine._threads import RunContext, ThreadTransport
from fl.engine._transport import Transport
from fl.engine._validation import open_ledger, warn_of_training_images
from fl.engine.run import Run
from fl.method import Method, require_method

__all__ = ["simulate"]


@options(SimulationConfig)
def simulate(method: Method, clients: Sequence[Images | StoredImages | ClientData], config: SimulationConfig) -> Run:
    """Run a federated method on this machine, in rounds between one server and its clients, each with its own images.

    Before the first round, every argument is checked, and the networks are tried on noise images. The result is
    bit-identical for any number of workers, and even if the run is killed and resumed. Private methods are an
    exception: their noise comes from the operating system and differs in each run, unless `secret` is given.

    Args:
        method: the method to run, such as `FedAvg(factory=...)`.
        clients: one set (or `ClientData`) for each client. A `Dataset` or a pair of images and labels is converted to
            a set (see `distillkit.sets.as_set`). A `StoredImages` is read each time its client gets a request. If
            `clients` is a list or tuple, all clients are checked before round 1. In any other sequence, a client is
            checked when it is drawn. A client without images gets no request, and is listed under `empty` in the
            history.
        config: options of the run, which you pass as keyword arguments. `SimulationConfig` lists them.

    Returns:
        The history, the server's state and the global models.

    Raises:
        ValueError, TypeError: an argument is not valid, such as sets with different normalizations.
        NoUsableReply: a round has fewer usable replies than `min_replies`; the last completed round is kept.
        fl.CheckpointError: `out` cannot be written, is damaged, or holds another run.
        distillkit.locking.InUse: another process uses `out` or the ledger; the message names the process.
        BudgetExhausted: the next values to be released would exceed the privacy ledger's budget; the last completed
            round is kept.
        KeyboardInterrupt: the user interrupted the run. The error is raised after the running clients have stopped.
            Call `simulate` again with `resume=True` to continue after the last completed round.
    """
    method = require_method(method)
    registry = ClientRegistry(clients, getattr(config.task, "num_classes", None), config.progress)
    if method.private and registry.all_loaded:
        for number, data in enumerate(registry):
            refuse_derived(data.train.info, f"clients[{number}]")
    if not method.private:  # a warning would depend on records
        warn_of_training_images(config.test, registry)
    workers = check.positive_int(config.workers, "workers")

    def open_transport(context: RunContext) -> Transport:
        runtime = ClientRuntime(
            method, context.task, registry, MemoryStore(context.memories), context.device, context.stop, context.ledger,
            context.scratch,
        )  # fmt: skip
        return ThreadTransport(runtime, workers)

    deployment = Deployment(
        first=registry.first,
        clients=len(registry),
        fingerprint=partial(data_fingerprint, registry),
        open=open_transport,
        open_ledger=partial(open_ledger, registry),
    )
    return execute(method, config, deployment, progress=config.progress)
