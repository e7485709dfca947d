"""What a gradient that someone sent gives away: the labels of its images, and the images themselves.

In order of cost: `label_of_one`, `class_counts`, `linear_input` and `linear_inputs` read them off by a formula, without
the network; `invert_gradient` searches for images with the same gradient. All of it works on plain tensors, the
gradients as a server or an eavesdropper holds them. `held_classes` says which classes any message gives away.
"""

from attacks.inversion.analytic import Recovered, linear_input, linear_inputs
from attacks.inversion.gradient import METHODS, Attempt, invert_gradient
from attacks.inversion.held import Held, held_classes
from attacks.inversion.labels import class_counts, label_of_one

__all__ = [
    "METHODS", "Attempt", "Held", "Recovered", "class_counts", "held_classes", "invert_gradient", "label_of_one",
    "linear_input", "linear_inputs",
]  # fmt: skip
