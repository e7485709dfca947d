"""Differential privacy for synthetic sets and for models, with a ledger of what was spent.

Three calls make something private from private images: `condense_private` (a set from noised class means, the best
place to start), `image_sgd` (a set by noised gradient steps, FedDM's way) and `train_private` (a model, by DP-SGD).
Each charges a `Ledger` before it draws noise and returns what the ledger guarantees. `plan` says beforehand how much
noise a wanted epsilon costs; `release`, `private_histogram` and `PrivateGradient` are the pieces for a mechanism of
one's own.
"""

from distillkit.privacy.accounting.composition import Bound, compose
from distillkit.privacy.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from distillkit.privacy.accounting.planning import Plan, plan
from distillkit.privacy.errors import (
    BatchStatistics,
    BudgetExhausted,
    NotAccountable,
    NotSeparable,
    PrivacyError,
    PrivateInitialization,
    PrivateStatistics,
)
from distillkit.privacy.gradients._hooks import ExampleGradients
from distillkit.privacy.gradients._noisy_sum import PrivateGradient
from distillkit.privacy.gradients.dp_sgd import train_private, without_batch_norm
from distillkit.privacy.gradients.per_example import per_example_gradients, require_per_example
from distillkit.privacy.ledger.assumptions import ASSUMED, FACTS
from distillkit.privacy.ledger.events import CLIENT, EVERYONE, RECORD, REPLACED, Event, Guarantee
from distillkit.privacy.ledger.ledger import Ledger
from distillkit.privacy.noise import Secret, as_secret
from distillkit.privacy.sets._public_maps import PublicMap, PublicMaps
from distillkit.privacy.sets.class_means import class_sums, fit_to_means, map_gradient, release
from distillkit.privacy.sets.condense import condense_private
from distillkit.privacy.sets.histogram import private_histogram
from distillkit.privacy.sets.image_sgd import image_gradients, image_sgd
from distillkit.privacy.sets.separable import SeparableLoss, require_separable, separable, squared_distance
from distillkit.privacy.sets.trained_networks import TrainedNetworks

__all__ = [
    "ASSUMED",
    "CLIENT",
    "EVERYONE",
    "FACTS",
    "RECORD",
    "REPLACED",
    "BatchStatistics",
    "Bound",
    "BudgetExhausted",
    "Event",
    "ExampleGradients",
    "Guarantee",
    "Ledger",
    "NotAccountable",
    "NotSeparable",
    "Plan",
    "PrivacyError",
    "PrivateGradient",
    "PrivateInitialization",
    "PrivateStatistics",
    "PublicMap",
    "PublicMaps",
    "Secret",
    "SeparableLoss",
    "TrainedNetworks",
    "as_secret",
    "class_sums",
    "compose",
    "condense_private",
    "fit_to_means",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_sigma",
    "image_gradients",
    "image_sgd",
    "map_gradient",
    "per_example_gradients",
    "plan",
    "private_histogram",
    "release",
    "require_per_example",
    "require_separable",
    "separable",
    "squared_distance",
    "train_private",
    "without_batch_norm",
]
__dir__ = __all__.copy
