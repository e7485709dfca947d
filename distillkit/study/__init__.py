"""A study: tasks x ways x seeds in one folder, and every table and picture of it made from its records alone."""

from distillkit._utils.provenance import git_commit
from distillkit.locking import worker_pool
from distillkit.study.candidate import Candidate, Cost, Job, grid
from distillkit.study.comparisons import compare_studies, paired_differences
from distillkit.study.condense import Condense
from distillkit.study.cost_estimate import Estimate
from distillkit.study.figures import curves, pictures
from distillkit.study.formatting import Table, mean_std, show, spark
from distillkit.study.named_tasks import TASK_NAMES, named_task
from distillkit.study.record import Record, RecordError, Records
from distillkit.study.records import read_records, write_records
from distillkit.study.study import Study
from distillkit.study.tables import summary_table
from distillkit.study.task import Allocation, Task, as_split
from distillkit.study.tuning import TuningResult, equal_search_sizes, read_choice, tuning_table

__all__ = [
    "TASK_NAMES",
    "Allocation",
    "Candidate",
    "Condense",
    "Cost",
    "Estimate",
    "Job",
    "Record",
    "RecordError",
    "Records",
    "Study",
    "Table",
    "Task",
    "TuningResult",
    "as_split",
    "compare_studies",
    "curves",
    "equal_search_sizes",
    "git_commit",
    "grid",
    "mean_std",
    "named_task",
    "paired_differences",
    "pictures",
    "read_choice",
    "read_records",
    "show",
    "spark",
    "summary_table",
    "tuning_table",
    "worker_pool",
    "write_records",
]
__dir__ = __all__.copy
