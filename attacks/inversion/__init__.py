"""What a message that someone sent gives away: the labels of its images, and the images themselves.

In order of cost: `label_of_one`, `class_counts`, `linear_input` and `linear_inputs` read them off a gradient by a
formula, without the network; `invert_message` searches for images with the same message: a `Gradient` (in one call,
`invert_gradient`), a `FedAvgUpdate` of several local steps, `ClassMeans`, or any that can be `Replayed`. All of it
works on plain tensors, as a server or an eavesdropper holds them. `sweep` tries one attack on several messages, such as
those of clients that defend themselves (`Defended`). `held_classes` says which classes any message gives away.
"""

from attacks.inversion.analytic import Recovered, linear_input, linear_inputs
from attacks.inversion.class_means import ClassMeans
from attacks.inversion.client_classes import Held, held_classes
from attacks.inversion.defences import Clip, Defence, Defended, Noise, Sparsify
from attacks.inversion.gradient import invert_gradient
from attacks.inversion.labels import class_counts, label_of_one
from attacks.inversion.message import METHODS, Attempt, invert_message
from attacks.inversion.observation import Replayed, Victim
from attacks.inversion.priors import Prior, batch_norm_prior
from attacks.inversion.sweep import Found, Sweep, sweep
from attacks.inversion.updates import FedAvgUpdate, Gradient

__all__ = [
    "METHODS", "Attempt", "ClassMeans", "Clip", "Defence", "Defended", "FedAvgUpdate", "Found", "Gradient", "Held",
    "Noise", "Prior", "Recovered", "Replayed", "Sparsify", "Sweep", "Victim", "batch_norm_prior", "class_counts",
    "held_classes", "invert_gradient", "invert_message", "label_of_one", "linear_input", "linear_inputs", "sweep",
]  # fmt: skip
__dir__ = __all__.copy
