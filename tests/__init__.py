"""Tests are of the sources, wherever `scripts/compile` was run: their doubles replace methods of single objects, which
compiled ones do not allow. `COHORT_COMPILED=yes` takes the compiled modules all the same."""

import os

os.environ.setdefault("COHORT_COMPILED", "no")
