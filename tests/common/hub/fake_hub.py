"""A hub on loopback that breaks off, refuses and lies on request, and the files of a model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

COMMIT = "c0ffee" + "0" * 34


def safetensors(data: bytes) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "model.safetensors": safetensors(bytes(1_000_000)),
    "pytorch_model.bin": b"pickle",
    "modeling_own.py": b"raise SystemExit",
    "original/consolidated.pth": b"pickle",
    "README.md": b"#",
}
FETCHED = {"config.json", "tokenizer.json", "merges.txt", "model.safetensors"}


@dataclass
class Repository:
    """Files at one commit. `status`: of every answer about files, with the hub's `code` for it; `breaks`: bytes of a
    file after which its connection ends, once for each entry; `listed`: sizes that the listing has instead."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main", COMMIT)
    status: int = 200
    code: str = ""
    breaks: dict[str, list[int]] = field(default_factory=dict)
    listed: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    without_ranges: bool = False
    """Whether a part of a file is refused (416)."""


class FakeHub:
    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str]] = []
        """Method, path after the repository's name, and the range, of each request."""
        self.tokens: set[str] = set()
        self.stall = False
        """Whether files that break off are held open instead."""
        self._ended = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        self._loop.call_soon_threadsafe(self._ended.set)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def gets(self) -> Counter[str]:
        """Count the files that were asked for."""
        return Counter(
            path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "resolve" in path
        )

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        self.url = f"http://{self._host}:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.add(request.headers.get("Authorization", ""))
        words = request.match_info["path"].removeprefix("api/models/").split("/")
        name, rest = "/".join(words[:2]), words[2:]
        self.requests.append((request.method, "/".join(rest), request.headers.get("Range", "")))
        repository = self.repositories.get(name)
        if repository is None:
            return web.Response(
                status=401, headers={"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            )
        listed = rest[0] != "resolve" and repository.code == "GatedRepo"  # what is gated is listed all the same
        if repository.status != 200 and not listed:
            headers = {"X-Error-Code": repository.code} if repository.code else {}
            return web.Response(status=repository.status, headers=headers)
        if rest[1] not in repository.revisions:
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        match rest[0]:
            case "revision":
                siblings = [{"rfilename": file, **self._facts(repository, file, "sha256")} for file in repository.files]
                return web.json_response({"id": name, "sha": COMMIT, "siblings": siblings})
            case "tree":
                entries = [
                    {"type": "file", "path": file, **self._facts(repository, file, "oid")} for file in repository.files
                ]
                return web.json_response(entries)
        return await self._file(request, repository, "/".join(rest[2:]))

    def _facts(self, repository: Repository, file: str, digest: str) -> dict[str, Any]:
        data = repository.files[file]
        size = repository.listed.get(file, len(data))
        facts: dict[str, Any] = {"size": size, "oid": hashlib.sha1(data).hexdigest()}
        if file.endswith((".safetensors", ".gguf")):
            found = repository.digests.get(file, hashlib.sha256(data).hexdigest())
            facts["lfs"] = {digest: found, "size": size, "pointerSize": 130}
        return facts

    async def _file(self, request: web.Request, repository: Repository, file: str) -> web.StreamResponse:
        data = repository.files[file]
        first = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if first and repository.without_ranges:
            return web.Response(status=416)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        headers["Content-Length"] = str(len(data) - first)
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        answer = web.StreamResponse(status=206 if first else 200, headers=headers)
        await answer.prepare(request)
        if request.method == "HEAD":
            return answer
        breaks = repository.breaks.get(file, [])
        last = breaks.pop(0) if breaks else len(data)
        await answer.write(data[first:last])
        if last < len(data):
            if self.stall:
                await self._ended.wait()
            assert request.transport is not None
            request.transport.close()
        return answer


def cached(cache: Path, repo: str, files: dict[str, bytes], revision: str = "main") -> Path:
    """Write a repository into a cache, as the hub's client lays it out. Return its snapshot."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for place in (snapshot, folder / "blobs", folder / "refs"):
        place.mkdir(parents=True)
    (folder / "refs" / revision).write_text(COMMIT)
    for name, data in files.items():
        blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot
