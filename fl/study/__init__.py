"""Several runs beside each other: a folder of them."""

from fl.study.experiment import Experiment

__all__ = ["Experiment"]
