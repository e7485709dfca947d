"""One report on what a finished run gives away, as an HTML file that opens alone and as Markdown."""

from attacks.reporting.folder import DamagedRun, NoRun
from attacks.reporting.report import OtherSpace, Report, report

__all__ = ["DamagedRun", "NoRun", "OtherSpace", "Report", "report"]
