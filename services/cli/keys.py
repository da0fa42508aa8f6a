"""`cohort keys`: the key file of a cluster, for `security.curve_secret_key_file`; and clients' API keys.

`cohort keys FILE` writes one CURVE key pair, readable by its owner alone; an existing key is never replaced. Every
process of a pipeline reads the same file. `cohort keys add` and the other words of `api_keys.py` are about clients'
keys instead. Decides nothing about the use of either.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cohort.common.command_line import Parser
from cohort.services.cli import api_keys

FILE_NAME = "cluster.key"
"""File name in a folder that is given instead of a file."""

EPILOG = """\
API keys of clients:
  cohort keys add NAME               make one; also list, show, set, revoke, usage: cohort keys add --help
  cohort keys ./add                  a cluster's key in a file of that name

examples:
  cohort keys ~/.config/cohort/cluster.key
  cohort serve --set security.curve_secret_key_file=~/.config/cohort/cluster.key

Copy the file to every machine of the pipeline and name it in the configuration of every process. It is one shared
secret: its holders are members of the cluster and may speak under any name, no others are heard. To change it, write a
new file elsewhere, name that one and restart all processes: old and new do not talk to each other.
"""


DESCRIPTION = """\
Make the key with which the processes of a pipeline know each other and encrypt what they say (CURVE): control messages,
and KV that travels over zmq. Or, with one of the words below, keep the API keys of clients."""


def main(words: Sequence[str]) -> int:
    """Run `cohort keys WORDS`."""
    if words and words[0] in api_keys.COMMANDS:
        return api_keys.main(words)
    parser = Parser(prog="cohort keys", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "target",
        metavar="FILE|FOLDER",
        help=f"where the key goes; in a folder that exists, or a name that ends in /, it is called {FILE_NAME}",
    )
    parser.add_argument(
        "--keep", action="store_true", help="succeed also if a usable key is there already, for set-ups that run twice"
    )
    return _make(parser.parse_args(words))


def _make(options: argparse.Namespace) -> int:
    """Make the key, or keep one that is there. Raises `CohortError` if it is not usable or cannot be written."""
    from cohort.common.errors import ConfigError
    from cohort.common.transport.security import generate_keys, load_keys

    path = Path(options.target).expanduser().absolute()
    if path.is_dir() or options.target.endswith("/"):
        path = path / FILE_NAME
    if options.keep and path.exists():
        load_keys(path)
        sys.stdout.write(f"{path}: a key is there already\n")
        return 0
    try:
        generate_keys(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    sys.stdout.write(f"{path}: made; name it in security.curve_secret_key_file of every process\n")
    return 0
