"""Privacy report of a finished run, as an HTML file and as Markdown, and a table of a published set's leaks."""

from attacks.reporting._recorded_run import DamagedRun, NoRun
from attacks.reporting.inversion import Inversion
from attacks.reporting.privacy_claim import Audit
from attacks.reporting.published_set import Leaks, leaks
from attacks.reporting.report import IncompatibleImages, Report, report

__all__ = ["Audit", "DamagedRun", "IncompatibleImages", "Inversion", "Leaks", "NoRun", "Report", "leaks", "report"]
__dir__ = __all__.copy
