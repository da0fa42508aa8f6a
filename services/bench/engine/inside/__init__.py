"""The measuring process of `cohort bench engine` and its tools: the only part of `engine` with torch."""
