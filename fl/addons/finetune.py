"""Fine-tuning: each client trains the global model further before it is tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fl.averaging import AddOn, Local, Settings
from fl.averaging._trials import require_matches
from fl.batches import Phase
from fl.message import Tensors


@dataclass(frozen=True)
class FineTune(AddOn):
    """Fine-tuned federated averaging (Wang et al., "Federated Evaluation of On-device Personalization", 2019).

    Use it to measure the gain from personalization. Before a test, a client trains the received model further on its
    own data. The result is tested as the client's "personal" model (`accuracy_personal` in the history) and then
    discarded. The add-on does not change the global training.

    By default, all parameters are fine-tuned with the clients' optimizer, as in the paper. Fine-tuning uses the
    client's own images, even if another add-on replaces the images for the ordinary training.

    Args:
        epochs: number of passes over the local data.
        steps: exact number of steps. Set it instead of `epochs`.
        train: pattern of the names of the trained parameters, such as "classifier.*" for the last layer. A leading "!"
            negates the pattern: "!classifier.*" trains all other parameters.
    """

    epochs: int = 1
    steps: int | None = None
    train: str = "*"

    data_access = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        Phase(self.epochs, self.steps, self.train)

    def check_run(self, settings: Settings, names: Sequence[str]) -> None:
        """Raise ValueError if the option `train`, a pattern of parameter names, matches no parameter."""
        require_matches([self.train], names, "FineTune(train=...)")

    def personal_model(self, local: Local) -> Tensors:
        """Return the received model after further training on the client's own images for `epochs` or `steps`."""
        return local.fit(local.received, self, Phase(self.epochs, self.steps, self.train))
