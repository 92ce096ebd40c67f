"""The parts of the report: statistics, findings in words, figures, tables, the page."""
