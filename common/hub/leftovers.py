"""Takes up a file of weights where a process that was killed left it.

Called by `fetch` before the hub's client, which gives each download a temporary name of its own
(`<SHA-256>.<random>.incomplete` among the blobs): its retries go on with that file, another process never does, so a
kill would cost all of it and leave it on the disk. The client's lock on the blob says whether its writer has ended;
SHA-256 says whether the parts fit. What cannot be completed is removed, and the client begins the file anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]


def take_up(folder: Path, repo: str, name: str, commit: str, *, size: int, sha256: str) -> None:
    """Complete the longest leftover of file `name`, if there is one, as the blob that the client then finds, and remove
    the others. `folder`: the repository's in the cache. Raises what the client raises where the network fails; then
    the leftover stays, with what was added."""
    blob = folder / "blobs" / sha256
    if not _leftovers(blob):
        return
    lock = folder.parent / ".locks" / folder.name / f"{sha256}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with (
        contextlib.suppress(Timeout),
        FileLock(lock, timeout=1.0, mode=0o664),
    ):  # held: another process is fetching it now
        while there := _leftovers(blob):
            if len(there) > 1 or blob.exists():
                there[0].unlink()
            elif _completed(there[0], hf_hub_url(repo, name, revision=commit), size, sha256):
                there[0].replace(blob)
            else:
                there[0].unlink()


def _leftovers(blob: Path) -> list[Path]:
    """Return the leftovers of a blob, the longest last."""
    return sorted(blob.parent.glob(f"{blob.name}.*.incomplete"), key=lambda each: each.stat().st_size)


def _completed(leftover: Path, url: str, size: int, sha256: str) -> bool:
    """Append what is missing. Return whether that gave the file; not where the hub refuses the rest."""
    there = leftover.stat().st_size
    if there > size:
        return False
    sys.stderr.write(f"[model] going on at {there / 1e6:,.1f} of {size / 1e6:,.1f} MB\n")
    try:
        with leftover.open("ab") as stream:
            http_get(url, stream, resume_size=there, headers=build_hf_headers(), expected_size=size)
    except HfHubHTTPError:
        return False
    with leftover.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == sha256
