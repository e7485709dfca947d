"""Gradient inversion: recovery of labels and images from the messages that clients send.

The cheapest attacks are `infer_label`, `class_counts`, `invert_linear` and `invert_linear_batch`: they use closed
formulas on a gradient and need no network. `invert_message` searches for images that would have caused the same
message. The message may be a `Gradient`, a `FedAvgUpdate` of several local steps, `ClassMeans`, or any
`ReplayableMessage`. All functions work on plain tensors, which a server or an
eavesdropper sees. `compare_messages` runs one attack on several messages, for example to compare defences
(`DefendedMessage`). `class_bounds` derives which classes a client certainly has.
"""

from attacks.inversion.analytic import RecoveredInput, invert_linear, invert_linear_batch
from attacks.inversion.class_means import ClassMeans
from attacks.inversion.client_classes import ClassBounds, class_bounds
from attacks.inversion.comparison import MessageComparison, MessageResult, compare_messages
from attacks.inversion.defences import Clip, Defence, DefendedMessage, Noise, Sparsify
from attacks.inversion.labels import class_counts, infer_label
from attacks.inversion.observation import ObservedMessage, ReplayableMessage
from attacks.inversion.priors import Prior, batch_norm_prior
from attacks.inversion.reconstruction import METHODS, Reconstruction, invert_message
from attacks.inversion.updates import FedAvgUpdate, Gradient

__all__ = [
    "METHODS", "ClassBounds", "ClassMeans", "Clip", "Defence", "DefendedMessage", "FedAvgUpdate", "Gradient",
    "MessageComparison", "MessageResult", "Noise", "ObservedMessage", "Prior", "Reconstruction", "RecoveredInput",
    "ReplayableMessage", "Sparsify", "batch_norm_prior", "class_bounds", "class_counts", "compare_messages",
    "infer_label", "invert_linear", "invert_linear_batch", "invert_message",
]  # fmt: skip
__dir__ = __all__.copy
