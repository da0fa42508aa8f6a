"""What every section of the check stands in: plan, guard, runner, shapes, bounds, predictions, report.

The room knows no section.
"""
