"""Studies: comparisons of candidates on several tasks and seeds, with all records in one folder.

A candidate is a method with its settings. Tables and figures are made from the records in the folder.
"""

from distillkit._utils.processes import worker_pool
from distillkit._utils.provenance import git_commit
from distillkit._utils.tables import Table, markdown_table
from distillkit.study._design import Estimate
from distillkit.study._power import PowerAnalysis, power_analysis, seeds_needed
from distillkit.study._records import Record, Records, read_records, write_records
from distillkit.study._tables import mean_std, paired_differences, summary_table
from distillkit.study._tuning import TuningResult, read_choice, tuning_table
from distillkit.study.candidate import Candidate, Cost, Job, grid
from distillkit.study.condense_candidate import Condense
from distillkit.study.figures import curves, pictures
from distillkit.study.history import RecordError
from distillkit.study.named_tasks import TASK_NAMES, named_task
from distillkit.study.study import Study
from distillkit.study.task import Allocation, Task, as_split

__all__ = [
    "TASK_NAMES", "Allocation", "Candidate", "Condense", "Cost", "Estimate", "Job", "PowerAnalysis", "Record",
    "RecordError", "Records", "Study", "Table", "Task", "TuningResult", "as_split", "curves",
    "git_commit", "grid", "markdown_table", "mean_std", "named_task", "paired_differences",
    "pictures", "power_analysis", "read_choice", "read_records", "seeds_needed", "summary_table",
    "tuning_table", "worker_pool", "write_records",
]  # fmt: skip
__dir__ = __all__.copy
