"""Start the ranks that a worker has on this host: `python -m cohort.services.rank_host --config FILE --host 1`."""

from __future__ import annotations

from cohort.services.rank_host.service import main

if __name__ == "__main__":
    main()
