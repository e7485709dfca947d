"""What a gradient that someone sent gives away: the labels of its images, and the images themselves.

In order of cost: `label_of_one`, `class_counts`, `linear_input` and `linear_inputs` read them off by a formula, without
the network. All of it works on plain tensors, the gradients as a server or an eavesdropper holds them.
"""

from attacks.inversion.analytic import Recovered, linear_input, linear_inputs
from attacks.inversion.labels import class_counts, label_of_one

__all__ = ["Recovered", "class_counts", "label_of_one", "linear_input", "linear_inputs"]
