"""`python -m cohort.services.gateway`: one gateway process."""

from cohort.common.config import Config
from cohort.common.process.service import service_main
from cohort.services.gateway.service import build


def shares_port(config: Config) -> bool:
    """Return whether a request to the port reaches any of several gateways, each with its metrics on another port."""
    return config.gateway.processes > 1


if __name__ == "__main__":
    service_main("gateway", build, inbox=True, serve_metrics=shares_port)
