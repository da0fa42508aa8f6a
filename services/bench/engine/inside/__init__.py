"""The measuring process of `cohort bench engine` and what it measures with: the only part of `engine` with torch."""
