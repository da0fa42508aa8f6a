"""Settles the model that a container's environment names (COHORT_MODEL), and prints it as options for `--config`.

Called by `docker/entrypoint`: in the container `model` and in Kubernetes' job `hub-model` with `--fetch`, which may
fetch it (COHORT_DOWNLOAD=1) and makes the folder around a GGUF file; elsewhere to find what they left.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cohort.common.errors import CohortError, ModelError
from cohort.common.hub.model_source import HubId, find, permission
from cohort.services.launcher.models.gguf_folder import served_folder


def options_of(name: str, revision: str, *, fetch: bool, name_only: bool) -> dict[str, str]:
    """Return the section `model`. `name_only`: without its path, for a process that cannot see it. Raises
    `CohortError`, `OSError`."""
    if name_only:
        return {"served_name": name if HubId.of(name) else Path(name).name.removesuffix(".gguf")}
    found = find(name, revision, download=permission(False) if fetch else "no")
    if not found.path.exists():
        raise ModelError(f"{name}: no such folder or file")
    folder = served_folder(found.path)
    return {"path": str(folder), "served_name": found.name or folder.name}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cohort.services.launcher.models.named_model",
        description="Print the options of a model by its id, folder or GGUF file.",
    )
    parser.add_argument("model", metavar="MODEL", help="as for `cohort serve`")
    parser.add_argument("--revision", default="", metavar="NAME", help="likewise")
    parser.add_argument("--fetch", action="store_true", help="fetch it where COHORT_DOWNLOAD=1 and it is not there")
    parser.add_argument("--name-only", action="store_true", help="the name that clients use, and no path")
    given = parser.parse_args(arguments)
    try:
        model = options_of(given.model, given.revision, fetch=given.fetch, name_only=given.name_only)
    except (CohortError, OSError) as error:
        sys.stderr.write(f"COHORT_MODEL: {error}\n")
        return 2
    sys.stdout.write(json.dumps({"model": model}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
