"""Differential privacy for synthetic sets and models, with a ledger of what was spent.

Three functions turn private images into something that may be published. `condense_private` fits a synthetic set to
noised class means; start with this function. `image_sgd` makes a synthetic set by DP-SGD on its images, as in FedDM.
`train_private` trains a network by DP-SGD. Each charges a `Ledger` before it draws noise. `plan_noise` computes the
noise multiplier for a target epsilon. `release`, `private_histogram` and `PrivateGradient` are building blocks for
mechanisms of your own.

Where to find what in this package:

- Noise is drawn in `secret.py` (`Secret`). It is added in `gradients/private_gradient.py` (DP-SGD on networks and
  images), `condensation/class_means.py` (`release`) and `condensation/histogram.py`. Callers outside this package that
  add noise themselves draw it from a `Secret` and charge an `Account`.
- Ledger lines are written by `Ledger.spend` in `ledger.py`, into the hash chain of `_journal.py`. `events.py` defines
  the events that a ledger records. `_child_ledger.py` contains the ledgers of clients on other machines. An `Account`
  combines a ledger with the client whose data are charged and the round that is recorded.
- Epsilon is computed by `compose` in `accounting/composition.py`. `accounting/planning.py` computes the noise for a
  given epsilon.
- User code never runs on records. `capture/` traces the code once, on a fake tensor, which has a shape but no values.
  Only the resulting fixed graph is evaluated on records.
- Inputs are checked in `validation/`: the data, the options and delta. Networks and losses that mix examples are
  refused. `errors.py` defines the errors. `assumptions.py` lists the inputs that each function assumes to be public.
"""

from distillkit.privacy.accounting.composition import Bound, Spend, compose, filter_order
from distillkit.privacy.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from distillkit.privacy.accounting.planning import NoisePlan, plan_noise
from distillkit.privacy.assumptions import ASSUMPTIONS, PUBLIC_INPUTS
from distillkit.privacy.condensation.class_means import class_means_gradient, class_sums, fit_to_means, release
from distillkit.privacy.condensation.condensation_options import EmbeddingNetworks, Passes
from distillkit.privacy.condensation.condense_private import condense_private
from distillkit.privacy.condensation.histogram import private_histogram
from distillkit.privacy.condensation.image_sgd import image_gradients, image_sgd
from distillkit.privacy.condensation.public_embedders import PublicEmbedder, PublicEmbedders
from distillkit.privacy.condensation.separable import SeparableLoss, require_separable, separable, squared_distance
from distillkit.privacy.condensation.trained_networks import TrainedNetworks
from distillkit.privacy.errors import (
    BatchStatistics,
    BudgetExhausted,
    NotAccountable,
    NotCapturable,
    NotSeparable,
    PrivacyError,
    PrivateInitialization,
    PrivateStatistics,
)
from distillkit.privacy.events import (
    ADD_OR_REMOVE_CLIENT,
    ADD_OR_REMOVE_RECORD,
    ALL_CLIENTS,
    REPLACE_RECORD,
    Event,
    Guarantee,
)
from distillkit.privacy.gradients.dp_sgd import train_private, without_batch_norm
from distillkit.privacy.gradients.per_example import ExampleGradients, per_example_gradients, require_per_example
from distillkit.privacy.gradients.private_gradient import PrivateGradient
from distillkit.privacy.ledger import Account, Ledger
from distillkit.privacy.secret import Secret, as_secret

__all__ = [
    "ADD_OR_REMOVE_CLIENT",
    "ADD_OR_REMOVE_RECORD",
    "ALL_CLIENTS",
    "ASSUMPTIONS",
    "PUBLIC_INPUTS",
    "REPLACE_RECORD",
    "Account",
    "BatchStatistics",
    "Bound",
    "BudgetExhausted",
    "EmbeddingNetworks",
    "Event",
    "ExampleGradients",
    "Guarantee",
    "Ledger",
    "NoisePlan",
    "NotAccountable",
    "NotCapturable",
    "NotSeparable",
    "Passes",
    "PrivacyError",
    "PrivateGradient",
    "PrivateInitialization",
    "PrivateStatistics",
    "PublicEmbedder",
    "PublicEmbedders",
    "Secret",
    "SeparableLoss",
    "Spend",
    "TrainedNetworks",
    "as_secret",
    "class_means_gradient",
    "class_sums",
    "compose",
    "condense_private",
    "filter_order",
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
