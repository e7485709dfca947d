"""Bytes that each method sends and stores, as formulas; tests compare traffic and the server's state with counts.

P   numbers in the network's weights           T   tensors among them
H   numbers in its classifier                  e   numbers in an embedding
K   classes, c of which a client holds         x   numbers in an image
i   images a class (`ipc`)                     a   anchors a class
V   virtual images                             s   patches a round
q   bytes of the shared picture or pool        r   share of rounds in which weights travel
G   numbers in FedGen's generator              O   bytes of its optimiser's state
d   draws of maps                              N   clients in the round
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["COSTS", "Cost", "bytes_of", "cost_of", "shown"]


@dataclass(frozen=True)
class Cost:
    """Cost of some methods in bytes.

    Attributes:
        names: public names of add-ons to `FedAvg`, or of methods.
        up: what a client sends in a round, from the second on.
        down: what it is sent in it.
        once: what it is sent once more on top: in its first round, and again only when that has changed.
        client: what it keeps between rounds.
        server: what the server keeps between rounds.
        each: what the server holds of every single client while a round lasts; else replies are summed as they come.
    """

    names: tuple[str, ...]
    up: str = "4*P + 8"
    down: str = "4*P"
    once: str = "0"
    client: str = "0"
    server: str = "4*P"
    each: str = "0"


IMAGE = "(4*x + 8)"
"""An image of numbers of 4 bytes, and its label."""

COSTS = (
    Cost(("FedAvg", "FedProx", "FedSAM", "FedDecorr", "FedReg", "FedDF", "FineTune", "DPSGD", "VFTL", "ClientDrift")),
    Cost(("FedAvgM",), server="8*P"),
    Cost(("FedAdam", "FedYogi", "FedAdagrad"), server="12*P"),
    Cost(("FedExP",), up="4*P + 16", server="8*P"),
    Cost(("FedNova",), up="4*P + 4*T + 8"),
    Cost(("SCAFFOLD",), up="8*P + 8", down="8*P", client="4*P", server="8*P"),
    Cost(("MOON", "FedCOG", "Ditto"), client="4*P"),
    Cost(("FedRep",), up="4*(P - H) + 8", down="4*(P - H)", client="4*H"),
    Cost(("FedProto",), up="4*K*(e + 1)", down="4*K*e + K", client="4*P", server="4*K*e + K"),
    Cost(("VHL", "NaiveVHL"), down="4*P + 16", once=f"V*{IMAGE}", server=f"4*P + V*{IMAGE}"),
    Cost(("VFA",), down="4*P + 16", once="4*K*e", server="4*P + 4*K*e"),
    Cost(("Condensed",), client=f"c*i*{IMAGE}"),
    Cost(("Anchors",), down="4*P + 16", once=f"K*a*{IMAGE}", server=f"4*P + K*a*{IMAGE}"),
    Cost(("FedLGD",), down="4*P + 16", once=f"K*a*{IMAGE}", client=f"c*i*{IMAGE}", server=f"4*P + K*a*{IMAGE}"),
    Cost(
        ("SharedImage", "SingleImage", "SharedPool"),
        up="4*r*P + 4*s*K + 8", down="4*P + 4*s + 16", once="q", server="4*P + 4*s",
    ),
    Cost(
        ("FedGen",),
        up="4*P + 4*K + 8", down="4*P + 4*G + 4*K", server="4*P + 4*G + 4*K + O", each="4*H + 4*K",
    ),
    Cost(("RobustMean",), each="4*P"),
    Cost(("LocalAccuracy",), each="8"),
    Cost(("FedDM", "Real"), up=f"c*i*{IMAGE}", server="4*P + N*c*i*(4*x + 16)", each="c*i*(4*x + 16)"),
    Cost(
        ("PrivateFedDM",),
        up=f"c*i*{IMAGE}", client="8*K", server="4*P + N*c*i*(4*x + 16)", each="c*i*(4*x + 16)",
    ),
    Cost(
        ("SummedFedDM",),
        up="8*d*K*(e + K)", down="4*P + 8", server=f"4*P + 8*d*K*(e + K) + K*i*{IMAGE}",
    ),
)  # fmt: skip
"""Of every public method and add-on; what several add-ons of one `FedAvg` send and keep beyond it adds up."""


def cost_of(name: str) -> Cost:
    """Return the formulas of a method or add-on by its public name."""
    return next(cost for cost in COSTS if name in cost.names)


def bytes_of(formula: str, values: dict[str, float]) -> float:
    """Evaluate a formula; a letter without a value is a `NameError`."""
    return float(eval(formula, {"__builtins__": {}}, values))


def shown(formula: str) -> str:
    """Format a formula for printing."""
    joined = re.sub(r"(?<=[0-9])[*]", "", formula).replace("*", r"\,")
    return "–" if formula == "0" else f"${joined}$"
