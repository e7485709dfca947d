"""One report on what a finished run gives away, as an HTML file that opens alone and as Markdown."""

from attacks.reporting.charges import Audit
from attacks.reporting.folder import DamagedRun, NoRun
from attacks.reporting.replays import Inversion
from attacks.reporting.report import OtherSpace, Report, report

__all__ = ["Audit", "DamagedRun", "Inversion", "NoRun", "OtherSpace", "Report", "report"]
__dir__ = __all__.copy
