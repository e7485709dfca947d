"""Thin federated layer over distillkit: composable methods, and engines that run them in one process or on Flower.

This package exports everything needed to run a method and to write an add-on, a filter or a method. The papers' add-ons
are in `fl.addons`, their methods in `fl.methods`.

Where to find what in this package:

- A round is `RoundRunner.run_round` in `engine/_rounds.py`; an exchange with the clients is `Exchanger.collect` in
  `engine/_exchange.py`.
- A reply is refused in `engine/_reply_checks.py`, which checks each entry by `Schema.check_reply` (`schema.py`), in
  `engine/_outliers.py` if it is far larger than the others, when `Aggregator.fold` (`aggregation.py`) adds it, or by
  the method's `receive_exchange`.
- A row of the history begins in `RoundStats.row` (`engine/_round_stats.py`); `run_round` adds the rest, and a method
  its own columns by `Server.notes`.
- Noise is added in `filters/client_dp.py`, `methods/summed_feddm.py`, and through `distillkit.privacy` in
  `addons/dp_sgd.py` and `methods/private_feddm.py`. These files charge it, too, most by `Client.spend`.
- Layers that stay with a client, as in FedBN, are options of `FedAvg`: `personal` and `buffers`.
"""

from typing import TYPE_CHECKING

from distillkit._utils.lazy_loading import lazy_submodules
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging import (
    AddOn,
    AveragingServer,
    ClientOptimizer,
    FedAvg,
    Local,
    Output,
    Settings,
    Step,
    require_full_models,
)
from fl.batches import Batch, Phase, shuffled_indices
from fl.engine import CheckpointError, ClientData, Run, RunFolder, history, simulate
from fl.filters import Adaptive, ClientDP, Filter, Filtered
from fl.message import Entry, Message, Tensors
from fl.method import Method, NoUsableReply, Predictor, evaluation_spec
from fl.networks import Factory, Networks
from fl.participants import Client, Server
from fl.task import Classification, LabelTask, MultiLabel

if TYPE_CHECKING:
    from fl.addons.fedopt import ServerAdaptive
    from fl.methods import FedDM, Real
    from fl.secure import Keyring, Registry, SecureSums

__all__ = [
    "Adaptive", "AddOn", "AggregatedReplies", "AveragingServer", "Batch", "CheckpointError", "Classification",
    "Client", "ClientDP", "ClientData", "ClientOptimizer", "Entry", "EntrySpec", "Factory", "FedAvg", "FedDM",
    "Filter", "Filtered", "Keyring", "LabelTask", "Local", "Message", "Method", "MultiLabel", "Networks",
    "NoUsableReply", "Output", "Phase", "Predictor", "Real", "Registry", "Run", "RunFolder", "Schema", "SecureSums",
    "Server", "ServerAdaptive", "Settings", "Step", "Tensors", "evaluation_spec", "history", "require_full_models",
    "shuffled_indices", "simulate",
]  # fmt: skip
__getattr__, __dir__ = lazy_submodules(
    __name__,
    ("addons", "deploy", "filters", "methods", "secure", "study"),
    __all__,
    {"ServerAdaptive": "fl.addons.fedopt"}
    | dict.fromkeys(("FedDM", "Real"), "fl.methods")
    | dict.fromkeys(("Keyring", "Registry", "SecureSums"), "fl.secure"),
)
