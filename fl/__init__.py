"""A thin federated layer over distillkit: methods as compositions, and an engine that runs them in process."""

from fl.averaging import FedAvg
from fl.client_dp import ClientDP
from fl.filters import Filter, Filtered
from fl.message import Entry, Message
from fl.method import Client, Method, NoUsableReply, Server
from fl.methods import FedDM, Real
from fl.simulate import Holding, Run, simulate
from fl.store import CheckpointError
from fl.task import Classification, MultiLabel

__all__ = [
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
    "Message",
    "Method",
    "MultiLabel",
    "NoUsableReply",
    "Real",
    "Run",
    "Server",
    "simulate",
]
