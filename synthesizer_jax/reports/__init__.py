"""Reports: charts, tables, one self-contained HTML page."""

from synthesizer_jax.reports.page import Answer, Example, Report, RunReport, render, write_report

__all__ = ["Answer", "Example", "Report", "RunReport", "render", "write_report"]
