"""`python -m cohort.services.gateway`: one gateway process."""

from cohort.common.service import service_main
from cohort.services.gateway.service import build

if __name__ == "__main__":
    service_main("gateway", build, inbox=True, serve_metrics=False)
