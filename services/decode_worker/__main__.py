"""Start a decode worker: `python -m cohort.services.decode_worker --config FILE --instance NAME`."""

from __future__ import annotations

from cohort.common.process.service import service_main
from cohort.services.decode_worker.service import serve

if __name__ == "__main__":
    service_main("decode_worker", serve)
