"""Ditto: a personal model for each client, which is kept near the global model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distillkit._utils.options import NonNegative
from distillkit.losses import proximal
from fl.averaging import AddOn, Local, Settings
from fl.averaging._composition import require_whole_models
from fl.batches import Phase
from fl.message import Entry, Message, Tensors


@dataclass(frozen=True)
class Ditto(AddOn):
    """Fair and robust federated learning through personalization (Li et al., "Ditto", ICML 2021, Algorithm 1).

    Every client gets a personal model, which is pulled towards the global model. After training the global model, a
    drawn client takes steps on its personal model v_k, which is never sent:

        v_k <- v_k - lr (grad F_k(v_k) + lam (v_k - w_t)),

    where w_t is the model received in round t, and F_k the local loss. The expression in parentheses is the gradient of
    the paper's h_k(v) = F_k(v) + (lam / 2) ||v - w_t||^2. The batches of these steps are drawn separately from those of
    the global training. Ditto does not change the global model. v_k has its own batch-norm statistics, and is tested as
    the "personal" model (`accuracy_personal` in the history). For a client that was never drawn, the global model is
    tested.

    Deviations: v_k starts from the first model that the client receives (the paper leaves v_k^0 open), and its steps
    use the method's optimizer (with any momentum and decay), as the global steps do. The paper picks lam per client on
    validation data in some experiments; here lam is the same for all clients. With lam = 0 the personal models are only
    trained locally.

    Args:
        lam: strength of the pull towards the global model, at least 0.
        epochs: number of passes over the local data for v_k in a round.
        steps: exact number of steps (the paper's s). Set it instead of `epochs`.
    """

    lam: NonNegative = 0.1
    epochs: int = 1
    steps: int | None = None

    own = Entry[Tensors]("first")
    data_access = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        Phase(self.epochs, self.steps)

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Refuse add-ons that train with differential privacy, and model parameters that stay with the clients.

        The personal model is pulled towards the global model, so the global model must have all parameters.
        """
        if private := next((a.name for a in addons if a.private), ""):
            raise ValueError(
                f"Ditto cannot be combined with {private}: it trains a second model on the records, which {private} "
                "hands to no other add-on; use FineTune, which trains only when a client tests its own model"
            )
        require_whole_models(self, settings, "it pulls a client's model towards the global one")

    def after_training(self, local: Local, update: Tensors, reply: Message) -> None:
        """Train the personal model for `epochs` passes or `steps` steps, and store it in the client's memory."""
        before = local.memory.get(self.own, local.received)
        local.memory[self.own] = local.fit(
            before,
            self,
            Phase(self.epochs, self.steps),
            lambda net: proximal(net.parameters(), local.start.values(), self.lam),
        )

    def personal_model(self, local: Local) -> Tensors:
        """Return the personal model in the client's memory or, if the client was never drawn, the received model."""
        return local.memory.get(self.own, local.received)
