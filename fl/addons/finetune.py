"""Fine-tuning: each client trains the global model further before it is tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fl.averaging import AddOn, Local, Settings
from fl.averaging._validation import require_matches
from fl.batches import Phase
from fl.message import Tensors

__all__ = ["FineTune"]


@dataclass(frozen=True)
class FineTune(AddOn):
    """Fine-tuned federated averaging (Wang et al., "Federated Evaluation of On-device Personalization", 2019).

    It measures the gain from personalization: each client trains the global model further for itself before it is
    tested. The global training is unchanged bit by bit. A tested client first trains the received model on its own
    data. The result is tested as its "personal" model (`accuracy_personal` in the history) and discarded.

    The paper fine-tunes all parameters with the clients' optimizer, as here; `train` selects parameters (only the last
    layer: "classifier.*"). The client's own images are used, even if the method trains on other images.

    Args:
        epochs: number of passes over the local data.
        steps: exact number of steps; give this or `epochs`.
        train: pattern of the names of the parameters to train; "!pattern" means all other parameters.
    """

    key = "FineTune"
    epochs: int = 1
    steps: int | None = None
    train: str = "*"

    data_access = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        Phase(self.epochs, self.steps, self.train)

    def check_run(self, settings: Settings, names: Sequence[str]) -> None:
        """Refuse a pattern `train` that matches no parameter."""
        require_matches([self.train], names, "FineTune(train=...)")

    def personal_model(self, local: Local) -> Tensors:
        """Return the received model, trained on the client's own data for `epochs` or `steps`."""
        return local.fit(local.received, self, Phase(self.epochs, self.steps, self.train))
