"""Reports of runs for people: report.html, one page that needs no network, and pages that compare runs."""

from train.report.compare import Comparison, compare, write_comparison
from train.report.folder import RunFolder
from train.report.page import write_report

__all__ = ["Comparison", "RunFolder", "compare", "write_comparison", "write_report"]
