"""RobustMean: a median, a trimmed mean or Krum in place of the mean, as a defense against false updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distillkit._utils.options import NonNegativeInt, PositiveInt
from fl.addons.client_drift import ClientDrift
from fl.addons.local_accuracy import LocalAccuracy
from fl.aggregation import AggregatedReplies, EntrySpec, Schema
from fl.averaging import AddOn, AveragingServer, FedAvg, Settings
from fl.averaging._composition import require_one_architecture
from fl.message import Entry, Message, Tensors, declared_entries
from fl.method import NoUsableReply


@dataclass(frozen=True)
class RobustMean(AddOn):
    """Coordinate-wise median or trimmed mean (Yin et al., "Byzantine-robust distributed learning", ICML 2018), or Krum.

    A single reply with large false values can change a plain mean arbitrarily. Here, the server combines the changes of
    the clients' weights by a rule on which a few such replies have limited influence. n is the number of replies in a
    round, and f (`attackers`) the largest number of false replies among them:

    * "median": the median of every coordinate (the mean of the middle two if n is even).
    * "trimmed": the mean of every coordinate without the f smallest and the f largest values, which is the paper's
      trimmed mean with beta = f / n.
    * "krum": the whole change of the client with the smallest sum of squared distances to the n - f - 2 changes closest
      to it (Blanchard et al., "Machine learning with adversaries", NeurIPS 2017). With `best` > 1 it is the mean of the
      `best` changes with the smallest sums (Multi-Krum). The history's rows list the selected clients as
      "krum_clients".

    If at most f replies are false, each coordinate of the median and of the trimmed mean lies between the smallest and
    the largest value of the honest clients. All replies have the same weight, as in both papers, so the option
    `weights="uniform"` of `FedAvg` is required. The server keeps all n changes of a round in memory.

    Deviations. The papers combine gradients; here, the server combines the clients' changes after their local steps.
    The papers' guarantees are for clients with similar data. If classes are distributed unevenly, honest changes
    differ, and the removed changes may come from the only clients that have a class. Here, Multi-Krum averages at most
    n - f changes; the paper allows up to n.

    Args:
        attackers: f, the largest number of false replies in a round, at least 0. The rule "median" uses it only to
            refuse rounds with too few replies. With the rule "trimmed", 0 disables the add-on.
        rule: rule that replaces the mean: "median", "trimmed" or "krum".
        best: number of changes that Krum averages, at least 1.

    Raises:
        ValueError: `best` is given for a rule other than Krum; the option `weights` of `FedAvg` is "samples"; there is
            more than one architecture; the networks have buffers that clients send; an add-on combines values of the
            replies other than the weight changes (SCAFFOLD) or rescales the mean (FedNova); or a round has fewer
            clients than the rule needs: 2 f + 1 for the median and the trimmed mean, and the larger of 2 f + 3 and
            f + `best` for Krum.
        NoUsableReply: a round has fewer replies than the rule needs.
    """

    attackers: NonNegativeInt
    rule: Literal["median", "trimmed", "krum"] = "median"
    best: PositiveInt = 1
    data_access = "none"
    updates = Entry[Tensors]("union")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best > 1 and self.rule != "krum":
            raise ValueError(f"best={self.best} belongs to rule='krum', got rule={self.rule!r}; leave it out")

    @property
    def disabled(self) -> bool:
        """True if the rule is a trimmed mean that removes no values, which equals the plain mean. The add-on is then
        disabled.
        """
        return self.rule == "trimmed" and self.attackers == 0

    @property
    def needed(self) -> int:
        """Smallest number of replies in a round with which the option `rule` can be applied."""
        f = self.attackers
        return max(2 * f + 3, f + self.best) if self.rule == "krum" else 2 * f + 1

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse options and add-ons with which one false reply could still change the model arbitrarily.

        Also refuse more than one architecture, because the median, the trimmed mean and Krum combine the changes of one
        model.
        """
        networks, some = settings.networks, 2  # any number of classes, because buffers do not depend on it
        if settings.weights != "uniform":
            raise ValueError(
                "RobustMean gives every reply the same weight: give weights='uniform', got "
                f"{settings.weights!r}, with which an attacker would choose its own weight"
            )
        require_one_architecture(self, settings, "it compares the changes of one model")
        if any(settings.sent_buffers(networks.template(n, some)) for n in networks.names):
            raise ValueError(
                "RobustMean does not protect buffers, which one false reply could change arbitrarily: give "
                "buffers='drop', or a network without batch norm (norm='instance')"
            )
        for addon in (a for a in addons if a is not self and not isinstance(a, ClientDrift | LocalAccuracy)):
            for entry in (e for e in declared_entries(addon) if e.rule != "first"):
                raise ValueError(
                    f"RobustMean does not protect {entry.key}, which combines replies by {entry.rule!r}, so that one "
                    f"false reply could change it arbitrarily: leave {addon.name} out"
                )

    def start(self, server: AveragingServer) -> None:
        """Raise ValueError if the run has fewer clients than the number of replies that the option `rule` needs."""
        if server.clients < self.needed:
            raise ValueError(
                f"{self._requirement()}; the run has {server.clients} clients: lower attackers, or add clients"
            )

    def expect(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """Change the schema so that it accepts updates of any finite norm.

        The server combines updates by the median, the trimmed mean or Krum, so one large update has little influence.
        """
        schema[FedAvg.update.key] = EntrySpec.finite(schema[FedAvg.update.key].value)

    def read_reply(self, server: AveragingServer, reply: Message, out: Message) -> None:
        """Write the client's weight change to `out` as one row, so that `aggregate` gets the changes of all clients."""
        out[self.updates] = {n: u.unsqueeze(0) for n, u in reply[FedAvg.update].items()}

    def aggregate(self, server: AveragingServer, replies: AggregatedReplies, mean: Tensors) -> Tensors:
        """Combine the clients' weight changes by the option `rule`, such as their median, instead of by their mean."""
        rows, count = replies[self.updates], len(replies.clients)
        if count < self.needed:
            raise NoUsableReply(f"{self._requirement()}, this one has {count}: raise participation, or lower attackers")
        if self.rule == "krum":
            chosen = _krum_choice(rows, self.attackers, self.best)
            server.notes["krum_clients"] = [replies.clients[i] for i in chosen]
            combined = {n: rows[n][chosen].double().mean(0) for n in mean}
        else:
            trim = (count - 1) // 2 if self.rule == "median" else self.attackers
            combined = {n: _trimmed_mean(rows[n], trim) for n in mean}
        return {n: c.to(mean[n].dtype) for n, c in combined.items()}

    def _requirement(self) -> str:
        kept = f", best={self.best}" if self.best > 1 else ""
        return f"RobustMean(attackers={self.attackers}, rule={self.rule!r}{kept}) needs {self.needed} replies a round"


def _trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """Return the mean of each coordinate without its `trim` smallest and `trim` largest values.

    This is the coordinate-wise trimmed mean of Yin et al., ICML 2018, with beta = trim / n. With trim = (n - 1) // 2,
    only the middle one or two values remain, so the result is the coordinate-wise median.
    """
    return rows.double().sort(dim=0).values[trim : len(rows) - trim].mean(0)


def _krum_choice(rows: Tensors, attackers: int, keep: int) -> list[int]:
    """Return the indices of the vectors that Krum selects, in ascending order: those with the `keep` smallest scores.

    The score of vector V_i is the sum of |V_i - V_j|^2 over the n - f - 2 vectors V_j closest to V_i (Blanchard et al.,
    NeurIPS 2017). Of vectors with equal scores, the one with the smaller index is selected, as in the paper.
    """
    flat = [tensor.reshape(len(tensor), -1).double() for tensor in rows.values()]
    apart = [torch.cdist(f, f, compute_mode="donot_use_mm_for_euclid_dist").square() for f in flat]
    squares = torch.stack(apart).sum(0)
    nearest = squares.sort(dim=1).values[:, 1 : len(squares) - attackers - 1]  # the first is its distance to itself
    return sorted(nearest.sum(1).sort(stable=True).indices[:keep].tolist())
