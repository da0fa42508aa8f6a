"""`cohort bench fit WHICH`: constants of the simulator's cost model, from measurements. Needs SciPy."""

from __future__ import annotations

import argparse

from cohort.common.errors import ConfigError
from cohort.services.bench.fit import cost_model, operators, published_mixing, shared_cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_subparsers(dest="which", metavar="WHICH", required=True)
    for name, module, summary in (
        ("cost-model", cost_model, "a device's efficiencies, from a profile"),
        ("operators", operators, "matrices and mixed attention, from tables of measured operators"),
        ("published-mixing", published_mixing, "the price of mixed iterations, from a paper's table"),
        ("shared-cores", shared_cores, "a cluster's constants for engines that share cores, from recordings"),
    ):
        one = which.add_parser(name, help=summary, description=module.__doc__)
        one.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(one)
        one.set_defaults(execute=module.execute)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen one. Raises `CohortError`."""
    try:
        code: int = args.execute(args)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return code
