"""Privacy report of a finished run, as HTML and Markdown, and measurement of what a published set reveals."""

from attacks.reporting._evidence import IncompatibleImages
from attacks.reporting._recorded_run import DamagedRun, NoRun
from attacks.reporting.inversion import Inversion
from attacks.reporting.privacy_claim import Audit
from attacks.reporting.published_set import Leaks, leaks
from attacks.reporting.report import Report, report

__all__ = ["Audit", "DamagedRun", "IncompatibleImages", "Inversion", "Leaks", "NoRun", "Report", "leaks", "report"]
__dir__ = __all__.copy
