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

    Use it to measure the gain from personalization. Before a test, a client trains the received model further on its
    own data. The result is tested as its "personal" model (`accuracy_personal` in the history) and then discarded. The
    global training is bit-identical to that without the add-on.

    The paper fine-tunes all parameters with the clients' optimizer, as here by default. `train` selects parameters;
    "classifier.*", for example, trains only the last layer. The client's own images are used, even if the method trains
    on other images.

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
