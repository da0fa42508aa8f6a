"""How much of files and batches there may be, of all owners together and of each one.

Called by `batch_api.py` for uploads and by `batch_runner.py` before each line, always in the store's thread, so that
check and reservation are one step. An owner is an API key: none may fill what all share.
"""

from __future__ import annotations

from typing import NoReturn

from cohort.common.errors import RequestError, busy
from cohort.services.gateway import bounds
from cohort.services.gateway.batches.batch_store import BatchStore, Usage

RETRY_UPLOAD_S, RETRY_BATCH_S = 5.0, 60.0


class Quota:
    def __init__(self, storage_bytes: int, *, owner_share: float, gateways: int = 1) -> None:
        """`gateways`: of one port. Uploads under way are known to their gateway alone, so each has its part of them."""
        self._storage_bytes = storage_bytes
        self._uploads = -(-bounds.BOUNDS.uploads // gateways)
        self._of_all = "" if gateways == 1 else f" here, of {bounds.BOUNDS.uploads} at {gateways} gateways"
        self._share = owner_share

    def begin_upload(self, store: BatchStore, file_id: str, owner: str, announced: int) -> None:
        """Reserve an upload of at least `announced` bytes. Raises `RequestError`, 429 or 507."""
        usage = store.usage(owner)
        if usage.owner_files + usage.owner_uploads >= (most := bounds.BOUNDS.files):
            _full(f"You have {most} files here, the most there may be; delete some first.")
        if usage.uploads >= self._uploads:
            raise busy(f"{self._uploads} files are being uploaded{self._of_all}.", RETRY_UPLOAD_S)
        if usage.owner_uploads >= (most := self._of(self._uploads)):
            raise busy(f"keys.owner_share: {most} files of yours are being uploaded.", RETRY_UPLOAD_S)
        self._check_bytes(usage, announced)
        store.reserve(file_id, owner, 0)

    def grow_upload(self, store: BatchStore, file_id: str, owner: str, size: int) -> None:
        """Grow an upload to `size` bytes. Raises `RequestError` 507 if they are too many."""
        store.release(file_id)
        self._check_bytes(store.usage(owner), size)
        store.reserve(file_id, owner, size)

    def begin_batch(self, store: BatchStore, owner: str) -> None:
        """Raise `RequestError` 429 or 507 if there is no room for a batch."""
        everyone, own = store.unfinished_count(owner)
        if everyone >= (most := bounds.BOUNDS.unfinished_batches):
            raise busy(f"{most} batches have not ended yet; retry when one has.", RETRY_BATCH_S)
        if own >= (most := self._of(most)):
            raise busy(
                f"keys.owner_share: {most} batches of yours have not ended yet; retry when one has.", RETRY_BATCH_S
            )
        self._check_bytes(store.usage(owner), 0)

    def may_run_line(self, store: BatchStore, owner: str) -> bool:
        """Return whether a line's result will find space, lines in work aside."""
        usage = store.usage(owner)
        return usage.bytes < self._storage_bytes and usage.owner_bytes < self._of(self._storage_bytes)

    def _check_bytes(self, usage: Usage, more: int) -> None:
        most, own = self._storage_bytes, self._of(self._storage_bytes)
        if usage.bytes + more > most:
            _full(f"batch.storage_bytes: files and results here may have {most} bytes together; delete some first.")
        if usage.owner_bytes + more > own:
            _full(f"keys.owner_share: your files and results may have {own} bytes together; delete some first.")

    def _of(self, limit: int) -> int:
        return max(1, int(limit * self._share))


def _full(message: str) -> NoReturn:
    raise RequestError(message, status=507, type_="insufficient_storage")
