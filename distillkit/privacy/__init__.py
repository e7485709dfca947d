"""Differential privacy for synthetic sets and for models, with a ledger of what was spent.

Three calls make something private from private images: `condense_private` (a set from noised class means, the best
place to start), `image_sgd` (a set by noised gradient steps, FedDM's way) and `train_private` (a model, by DP-SGD).
Each charges a `Ledger` before it draws noise and returns what the ledger guarantees. `plan` says beforehand how much
noise a wanted epsilon costs; `release`, `private_histogram` and `PrivateGradient` are the pieces for a mechanism of
one's own.
"""

from distillkit.privacy._clients import ALL_CLIENTS
from distillkit.privacy.accounting.composition import Bound, compose
from distillkit.privacy.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from distillkit.privacy.accounting.planning import NoisePlan, plan_noise
from distillkit.privacy.assumptions import ASSUMPTIONS, PUBLIC_INPUTS
from distillkit.privacy.errors import (
    BatchStatistics,
    BudgetExhausted,
    NotAccountable,
    NotSeparable,
    PrivacyError,
    PrivateInitialization,
    PrivateStatistics,
)
from distillkit.privacy.events import ADD_OR_REMOVE_CLIENT, ADD_OR_REMOVE_RECORD, REPLACE_RECORD, Event, Guarantee
from distillkit.privacy.gradients._engines import ExampleGradients
from distillkit.privacy.gradients.dp_sgd import train_private, without_batch_norm
from distillkit.privacy.gradients.per_example import per_example_gradients, require_per_example
from distillkit.privacy.gradients.private_gradient import PrivateGradient
from distillkit.privacy.ledger import Ledger
from distillkit.privacy.noise import Secret, as_secret
from distillkit.privacy.sets.class_means import class_means_gradient, class_sums, fit_to_means, release
from distillkit.privacy.sets.condense import condense_private
from distillkit.privacy.sets.histogram import private_histogram
from distillkit.privacy.sets.image_sgd import image_gradients, image_sgd
from distillkit.privacy.sets.public_embedders import PublicEmbedder, PublicEmbedders
from distillkit.privacy.sets.separable import SeparableLoss, require_separable, separable, squared_distance
from distillkit.privacy.sets.trained_networks import TrainedNetworks

__all__ = [
    "ADD_OR_REMOVE_CLIENT",
    "ADD_OR_REMOVE_RECORD",
    "ALL_CLIENTS",
    "ASSUMPTIONS",
    "PUBLIC_INPUTS",
    "REPLACE_RECORD",
    "BatchStatistics",
    "Bound",
    "BudgetExhausted",
    "Event",
    "ExampleGradients",
    "Guarantee",
    "Ledger",
    "NoisePlan",
    "NotAccountable",
    "NotSeparable",
    "PrivacyError",
    "PrivateGradient",
    "PrivateInitialization",
    "PrivateStatistics",
    "PublicEmbedder",
    "PublicEmbedders",
    "Secret",
    "SeparableLoss",
    "TrainedNetworks",
    "as_secret",
    "class_means_gradient",
    "class_sums",
    "compose",
    "condense_private",
    "fit_to_means",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_sigma",
    "image_gradients",
    "image_sgd",
    "per_example_gradients",
    "plan_noise",
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
