"""Reports: charts, tables, one self-contained HTML page."""

from synthesizer_jax.reports.page import Example, Report, RunReport, render, write_report

__all__ = ["Example", "Report", "RunReport", "render", "write_report"]
