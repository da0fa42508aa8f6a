"""Start the bucketing manager: `python -m cohort.services.bucketing_manager --config FILE`."""

from __future__ import annotations

from cohort.common.process.service import service_main
from cohort.services.bucketing_manager.service import serve

if __name__ == "__main__":
    service_main("bucketing_manager", serve)
