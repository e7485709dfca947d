"""Objects as JSON, and built again from it: what makes a run's record enough to repeat the run."""

from distillkit._utils.init_recorder import Recorded
from distillkit.recipes.making import NotMade, made
from distillkit.recipes.saying import NotRecorded, named, recipe

__all__ = ["NotMade", "NotRecorded", "Recorded", "made", "named", "recipe"]
