"""Rows of the benchmark table with their targets."""

from __future__ import annotations

from functools import partial

from tests.benchmarks import steps
from tests.benchmarks.federated import averaging, condensing
from tests.benchmarks.race import Row

ROWS = (
    Row("DM step, one thread", steps.matching, target=0.47, share=0.65),
    Row("DM step, two threads", steps.matching, by="wall", target=0.44, threads=2),
    Row("FedLGD refinement, cached means", partial(steps.matching, cache=True), target=0.12, of=100),
    Row("DC step", steps.gradients, target=0.70),
    Row("gradient matching to a given gradient", steps.given_gradient),
    Row("inversion, two steps", steps.inversion),
    Row("private images, a step", steps.image_steps),
    Row("private class means, a step", steps.mean_steps),
    Row("DP-SGD step beside Opacus alone", steps.private_training),
    Row("FedAvg round, LeNet, beside the bare loop", partial(averaging, kind="lenet"), target=1.05),
    Row("FedAvg round, ConvNet, beside the bare loop", partial(averaging, kind="convnet"), target=1.03),
    Row("FedAvg round, ConvNet, beside PyTorch's layers", partial(averaging, kind="convnet", layers=True)),
    Row("FedDM round", condensing, within=0.05),
    Row("evaluation", steps.testing),
)
"""`matching` counts all of a step; FedLGD's means are computed once for 100 steps, as it refines. A round
of FedDM trains on images that differ by rounding, which every step of it multiplies."""
