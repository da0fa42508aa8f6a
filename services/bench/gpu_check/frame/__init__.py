"""What every section of the check stands in: plan, guard, runner, tests, shapes, bounds, report.

The room knows no section.
"""
