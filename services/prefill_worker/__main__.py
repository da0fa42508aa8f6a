"""Start a prefill worker: `python -m cohort.services.prefill_worker --config FILE --instance NAME`."""

from __future__ import annotations

from cohort.common.process.service import service_main
from cohort.services.prefill_worker.service import serve

if __name__ == "__main__":
    service_main("prefill_worker", serve)
