"""What a message that someone sent gives away: the labels of its images, and the images themselves.

In order of cost: `infer_label`, `class_counts`, `invert_linear` and `invert_linear_batch` read them off a gradient by a
formula, without the network; `invert_message` searches for images with the same message: a `Gradient` (in one call,
`invert_gradient`), a `FedAvgUpdate` of several local steps, `ClassMeans`, or any that can be `ReplayableMessage`. All of it
works on plain tensors, as a server or an eavesdropper holds them. `compare_messages` tries one attack on several messages, such as
those of clients that defend themselves (`DefendedMessage`). `class_bounds` says which classes any message gives away.
"""

from attacks.inversion.analytic import RecoveredInput, invert_linear, invert_linear_batch
from attacks.inversion.class_means import ClassMeans
from attacks.inversion.client_classes import ClassBounds, class_bounds
from attacks.inversion.comparison import MessageComparison, MessageResult, compare_messages
from attacks.inversion.defences import Clip, Defence, DefendedMessage, Noise, Sparsify
from attacks.inversion.gradient import invert_gradient
from attacks.inversion.labels import class_counts, infer_label
from attacks.inversion.observation import ObservedMessage, ReplayableMessage
from attacks.inversion.priors import Prior, batch_norm_prior
from attacks.inversion.reconstruction import METHODS, Reconstruction, invert_message
from attacks.inversion.updates import FedAvgUpdate, Gradient

__all__ = [
    "METHODS",
    "ClassBounds",
    "ClassMeans",
    "Clip",
    "Defence",
    "DefendedMessage",
    "FedAvgUpdate",
    "Gradient",
    "MessageComparison",
    "MessageResult",
    "Noise",
    "ObservedMessage",
    "Prior",
    "Reconstruction",
    "RecoveredInput",
    "ReplayableMessage",
    "Sparsify",
    "batch_norm_prior",
    "class_bounds",
    "class_counts",
    "compare_messages",
    "infer_label",
    "invert_gradient",
    "invert_linear",
    "invert_linear_batch",
    "invert_message",
]  # fmt: skip
__dir__ = __all__.copy
