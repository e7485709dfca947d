"""A thin federated layer over distillkit: methods as compositions, and an engine that runs them in process."""

from fl.averaging import AddOn, FedAvg
from fl.batches import Batch, Phase
from fl.engine import CheckpointError, Holding, Loopback, Run, history, simulate
from fl.filters import ClientDP, Filter, Filtered
from fl.message import Entry, Message
from fl.method import Client, Method, NoUsableReply, Predictor, Server, sums_like
from fl.methods import FedDM, Real
from fl.reduce import Like, Reduced
from fl.task import Classification, MultiLabel

__all__ = [
    "AddOn",
    "Batch",
    "CheckpointError",
    "Classification",
    "Client",
    "ClientDP",
    "Entry",
    "FedAvg",
    "FedDM",
    "Filter",
    "Filtered",
    "Holding",
    "Like",
    "Loopback",
    "Message",
    "Method",
    "MultiLabel",
    "NoUsableReply",
    "Phase",
    "Predictor",
    "Real",
    "Reduced",
    "Run",
    "Server",
    "history",
    "simulate",
    "sums_like",
]
