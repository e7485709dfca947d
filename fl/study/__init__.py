"""Several runs beside each other: a folder of them, and how their numbers are shown."""

from fl.study.experiment import Experiment, git_commit, mean_std, processes, show, spark

__all__ = ["Experiment", "git_commit", "mean_std", "processes", "show", "spark"]
