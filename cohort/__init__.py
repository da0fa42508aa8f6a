"""Cohort: one LLM serving system in which five published schedulers run live, combine, and can be compared.

This folder is the import root. The top-level folders `services/`, `common/` and `kernels/` are linked
below it, because their bare names collide with other people's packages: always import `cohort.common`,
`cohort.services`, `cohort.kernels`.
"""

__version__ = "0.1.0"
