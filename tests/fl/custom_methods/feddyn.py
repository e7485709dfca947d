"""FedDyn (Acar et al., ICLR 2021, Algorithm 1) written from the documentation with public names only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fl import AddOn, Entry, FedAvg
from fl.addons import SCAFFOLD


@dataclass(frozen=True)
class FedDyn(AddOn):
    """Clients minimise L_k(w) - <g_k, w> + (alpha / 2) ||w - w_t||^2; the server adds -h / alpha to the mean."""

    alpha: float = 0.1
    data_access = "none"
    own = Entry[dict[str, torch.Tensor]]("first")  # g_k, in the client's memory
    h = Entry[dict[str, torch.Tensor]]("first")  # on the server

    @property
    def damping(self) -> float:  # type: ignore[override]
        return self.alpha

    def check(self, settings: Any, addons: Any) -> None:
        if settings.weights != "uniform" or len(settings.networks.names) > 1:
            raise ValueError("FedDyn counts all clients alike and has one h: weights='uniform', one architecture")
        if any(isinstance(addon, SCAFFOLD) for addon in addons):
            raise ValueError("FedDyn and SCAFFOLD both correct the clients' drift: give one of them")

    def before_training(self, local: Any) -> None:
        zeros = {name: torch.zeros_like(w) for name, w in local.start.items()}
        local.scratch(self)["g"] = local.memory.get(self.own, zeros)

    def loss(self, step: Any) -> torch.Tensor:
        g, start, now = step.local.scratch(self)["g"], step.local.start, step.local.shared_parameters()
        pulls = [self.alpha / 2 * (w - start[name]).square().sum() - (g[name] * w).sum() for name, w in now.items()]
        return torch.stack(pulls).sum()

    def after_training(self, local: Any, update: Any, reply: Any) -> None:
        g = local.scratch(self)["g"]
        local.memory[self.own] = {name: g[name] - self.alpha * d for name, d in local.delta.items()}

    def aggregate(self, server: Any, replies: Any, mean: Any) -> Any:
        share = replies.weight(FedAvg.update) / server.clients
        h = server.state.get(self.h, {name: torch.zeros_like(d) for name, d in mean.items()})
        server.state[self.h] = {name: h[name] - self.alpha * share * d for name, d in mean.items()}
        return mean

    def server_step(self, server: Any, mean: Any) -> Any:
        return {name: d - server.state[self.h][name] / self.alpha for name, d in mean.items()}
