"""Fetches a model from the hub into the cache: safetensors or one GGUF file, with what belongs to them; nothing else.

A process of its own, started by `model_source`: `python -m cohort.common.hub.fetch REPO REVISION CACHE`. Prints the
snapshot's folder, or one sentence and ends with 1; progress goes to stderr. Connections, the token (HF_TOKEN), the
endpoint (HF_ENDPOINT) and the cache's layout are huggingface_hub's business. A connection that breaks is taken up where
it broke; when the process is killed, files that are complete stay, and the next one goes on within the others' weights.

Files that hold code or pickles are never fetched. What arrived is compared with the hub's listing, by SHA-256 where it
has one and else by size, and removed where it differs. Weights come last: a snapshot with all of them is whole.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

from huggingface_hub import HfApi, ModelInfo, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from cohort.common.engine.config.safetensors_header import read_index
from cohort.common.errors import ModelError
from cohort.common.hub.leftovers import take_up
from cohort.common.hub.model_source import INDEX, TOKENIZER_BESIDE_GGUF, WEIGHTS, HubId, near
from cohort.common.json_files import MOST_INDEX_BYTES

TIMEOUT_S = 30.0  # of an answer that lists files
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_BESIDE = (".json", ".jinja", ".model", ".tiktoken")
"""Endings of files that belong to a model in Hugging Face format; files of other names are for other programs."""
_VOCABULARIES = ("merges.txt", "vocab.txt")
_PART = "-of-"


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of the hub's listing: its bytes, and their SHA-256 where it is stored apart from the text files."""

    size: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    commit: str
    files: dict[str, Listed]


def fetch(wanted: HubId, revision: str, cache: Path, *, with_weights: bool, ask: bool) -> Path:
    """Fetch what the cache lacks of a model. Return its snapshot. Raises `ModelError`."""
    with _sentences(wanted, revision):
        info = HfApi().model_info(wanted.repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    listing = _listing(wanted, info)
    snapshot = cache / wanted.folder / "snapshots" / listing.commit
    weights = _weights(wanted, listing, revision, cache) if with_weights or wanted.file else set()
    small = _small(listing.files, beside_gguf=bool(wanted.file))
    absent = {name for name in small | weights if not (snapshot / name).exists()}
    size = sum(listing.files[name].size for name in absent)
    _check_space(wanted, size, cache)
    what = f"{len(absent)} files, {size / 1e6:,.1f} MB, from {constants.ENDPOINT} into {cache}"
    if ask and not _agreed(f"{wanted} is not on this machine. Fetch {what}? [y/N] "):
        raise ModelError(f"{wanted}: not fetched")
    sys.stderr.write(f"[model] fetching {wanted}: {what}\n")
    for name in sorted(absent & weights):
        with _sentences(wanted, revision):
            _take_up(wanted, cache, name, listing)
    for names in (small, weights):
        if names:
            with _sentences(wanted, revision):
                patterns = [glob.escape(name) for name in sorted(names)]
                made = snapshot_download(wanted.repo, revision=revision, cache_dir=cache, allow_patterns=patterns)
            if Path(made).name != listing.commit:
                raise ModelError(f"{wanted}: {revision} changed meanwhile; run this again to fetch the new one")
    for name in sorted(absent):
        _verify(wanted, snapshot / name, listing.files[name])
    return snapshot


def _take_up(wanted: HubId, cache: Path, name: str, listing: Listing) -> None:
    size, sha256 = listing.files[name].size, listing.files[name].sha256
    if sha256:
        take_up(cache / wanted.folder, wanted.repo, name, listing.commit, size=size, sha256=sha256)


def _listing(wanted: HubId, info: ModelInfo) -> Listing:
    """Read the hub's answer. Raises `ModelError` where it tells no commit, or of a file no size."""
    files = {}
    for each in info.siblings or ():
        if each.size is None:
            raise ModelError(f"{wanted}: {constants.ENDPOINT} lists no size of {each.rfilename}")
        files[each.rfilename] = Listed(each.size, each.lfs.sha256 if each.lfs else "")
    if not info.sha:
        raise ModelError(f"{wanted}: {constants.ENDPOINT} names no commit")
    return Listing(info.sha, files)


def _weights(wanted: HubId, listing: Listing, revision: str, cache: Path) -> set[str]:
    """Return names of the weights' files. Fetches the index of shards, which names them. Raises `ModelError`."""
    files = listing.files
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if wanted.file:
        if wanted.file not in files:
            raise ModelError(f"{wanted.repo} has no {wanted.file}; {_listed(ggufs)}")
        if _PART in wanted.file:
            raise ModelError(f"{wanted} is one of several parts; GGUF files in parts are not served")
        return {wanted.file}
    if INDEX in files:
        if files[INDEX].size > MOST_INDEX_BYTES:
            raise ModelError(f"{wanted}: {INDEX} has {files[INDEX].size} bytes, more than {MOST_INDEX_BYTES}")
        with _sentences(wanted, revision):
            index = Path(hf_hub_download(wanted.repo, INDEX, revision=listing.commit, cache_dir=cache))
        _verify(wanted, index, files[INDEX])
        shards = set(read_index(index).values())
        if unknown := sorted(shards - files.keys()):
            raise ModelError(f"{wanted}: {INDEX} names {unknown[0]}, which the repository does not have")
        return shards | {INDEX}
    if WEIGHTS in files:
        return {WEIGHTS}
    pickles = sorted(name for name in files if name.endswith(_PICKLES))
    if pickles:
        raise ModelError(
            f"{wanted} has its weights as pickles alone ({pickles[0]}), which are never fetched: reading one can run "
            "its author's code; take a repository of the model that has safetensors"
        )
    raise ModelError(f"{wanted} has neither {WEIGHTS} nor {INDEX}" + (f"; {_listed(ggufs)}" if ggufs else ""))


def _small(files: Collection[str], *, beside_gguf: bool) -> set[str]:
    """Return names of configuration and tokenizer, of the repository's first level. Beside a GGUF file: a tokenizer
    that is taken before the one in its metadata."""
    top = {name for name in files if PurePath(name).name == name and name != INDEX}
    if beside_gguf:
        return top & set(TOKENIZER_BESIDE_GGUF) if TOKENIZER_BESIDE_GGUF[0] in top else set()
    indexes = {name for name in top if name.endswith(".index.json")}
    return {name for name in top if name.endswith(_BESIDE) or name in _VOCABULARIES} - indexes


def _listed(ggufs: list[str]) -> str:
    if not ggufs:
        return "it has no GGUF file"
    return f"its GGUF files, to be named as REPO:FILE: {', '.join(ggufs[:8])}" + (" …" if len(ggufs) > 8 else "")


def _check_space(wanted: HubId, size: int, cache: Path) -> None:
    place = cache
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if size > free:
        raise ModelError(
            f"{wanted}: {size / 1e6:,.1f} MB are to be fetched, and {place} has {free / 1e6:,.1f} MB left; make room, "
            "or name another place by HF_HUB_CACHE"
        )


def _agreed(question: str) -> bool:
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _verify(wanted: HubId, file: Path, listed: Listed) -> None:
    """Compare a file with the listing, and remove it where it differs. Raises `ModelError`."""
    found, size = "", file.stat().st_size
    if listed.sha256:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    if size == listed.size and found == listed.sha256:
        return
    file.resolve().unlink()
    file.unlink(missing_ok=True)
    raise ModelError(
        f"{wanted}: {file.name} arrived with {size} bytes and {f'SHA-256 {found[:12]}…' if found else 'no digest'}, "
        f"{constants.ENDPOINT} lists {listed.size} and {listed.sha256[:12] or 'none'}; it was removed, run this again"
    )


@contextmanager
def _sentences(wanted: HubId, revision: str) -> Iterator[None]:
    """Raise what the hub's client raises as `ModelError`: one sentence with the cure."""
    try:
        yield
    except Exception as error:  # the client's own errors, those of its HTTP library, the system's
        raise ModelError(f"{wanted}: {_said(error, wanted, revision)}") from error


def _said(error: Exception, wanted: HubId, revision: str) -> str:
    hub = constants.ENDPOINT
    match error:
        case GatedRepoError():
            return f"gated: accept its licence at {hub}/{wanted.repo}, and set HF_TOKEN to a token of that account"
        case RepositoryNotFoundError():
            return f"no model of {hub}, or a private one{near(wanted.repo)}: mend the name, or set HF_TOKEN"
        case RevisionNotFoundError():
            return f"it has no revision {revision}: name a branch, tag or commit by --revision"
        case EntryNotFoundError() if not isinstance(error, LocalEntryNotFoundError):
            return f"{hub} does not have a file that it lists: {_first_line(error)}"
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"{hub} refuses ({error.response.status_code}): set HF_TOKEN to a token that may read it"
        case HfHubHTTPError():
            return f"{hub} answers {error.response.status_code}: {_first_line(error)}; try again later"
    return (
        f"not fetched from {hub}: {type(error).__name__}: {_first_line(error)}; check the network, the disk and "
        "HF_ENDPOINT, then run this again: files that are complete stay"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cohort.common.hub.fetch", description="Fetch a model from the hub."
    )
    parser.add_argument("repo", metavar="REPO")
    parser.add_argument("revision", metavar="REVISION", help="branch, tag or commit")
    parser.add_argument("cache", type=Path, metavar="CACHE", help="folder in the layout of Hugging Face's cache")
    parser.add_argument("--file", default="", help="a GGUF file of it, and no other weights")
    parser.add_argument("--no-weights", action="store_true", help="configuration and tokenizer alone")
    parser.add_argument("--ask", action="store_true", help="ask at the terminal first")
    options = parser.parse_args(arguments)
    wanted = HubId(options.repo, options.file)
    try:
        made = fetch(wanted, options.revision, options.cache, with_weights=not options.no_weights, ask=options.ask)
    except (ModelError, OSError) as error:
        sys.stdout.write(f"{error}\n".replace("\n", " ").rstrip() + "\n")
        return 1
    except KeyboardInterrupt:
        sys.stdout.write(f"{wanted}: interrupted; files that are complete stay\n")
        return 1
    sys.stdout.write(f"{made}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
