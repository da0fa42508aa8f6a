"""LoRA adapters by the names that clients use: those of the configuration, and those added while the server runs.

    POST /v1/load_lora_adapter ─▶ add ─▶ adapters.json ─▶ every gateway of the port ─▶ requests that name the folder

Only gateways know added adapters. A request that selects one carries the folder, and a name for workers that has the
file's stamp in it (`lora_checkpoint.py`): any worker, also one that has just started, loads it from the request; what
was added again under the same name is another adapter to caches and slots, and requests under way keep theirs.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from cohort.common.errors import ModelError, RequestError
from cohort.common.keys.private_files import private_folder, write_private
from cohort.services.gateway.http.service_headers import printable

if TYPE_CHECKING:  # a gateway loads what knows models when the first adapter is added
    from cohort.common.engine.config.model_config import ModelGeometry

_read = msgspec.json.Decoder(dict[str, str]).decode


class AdapterTable(Mapping[str, Path]):
    """Folders by name. Read again whenever another gateway has changed the file."""

    def __init__(
        self,
        configured: Mapping[str, Path],
        *,
        model: Path,
        names: frozenset[str],
        file: Path,
        log: structlog.stdlib.BoundLogger,
        refused: str = "",
    ) -> None:
        """`names`: those of the base model. `refused`: the reason why none can be added; "" = they can."""
        self._configured = configured
        self._model = model
        self._names = names
        self._file = file
        self._log = log
        self._refused = refused
        self._stamp: tuple[int, int] | None = None
        self._added: dict[str, tuple[str, Path]] = {}
        """Name for workers and folder of each added adapter."""

    def __getitem__(self, name: str) -> Path:
        added = self._current().get(name)
        return self._configured[name] if added is None else added[1]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._configured, *self._current()])

    def __len__(self) -> int:
        return len(self._configured) + len(self._current())

    def reference(self, name: str) -> tuple[str, str]:
        """Return an adapter's name for workers, and the folder if they learn it from the request."""
        added = self._current().get(name)
        if added is not None:
            return added[0], str(added[1])
        if name and name not in self._configured:  # removed since the request was parsed
            raise _unknown(name)
        return name, ""

    def add(self, name: str, folder: str, *, anew: bool) -> None:
        """Add an adapter for all gateways. `anew`: also if there is one of this name. Raises `RequestError`. Blocks."""
        if self._refused:
            raise RequestError(f"No adapter can be added: {self._refused}.", param="lora_path")
        if name in self._configured or name in self._names:
            raise RequestError(f"`{printable(name)}` is the name of a model of the configuration.", param="lora_name")
        path = Path(folder).expanduser()
        if not path.is_absolute():
            raise RequestError("lora_path: an absolute path, which is the same on every worker.", param="lora_path")
        try:
            self._checked(name, path)
        except ModelError as error:
            raise RequestError(str(error), param="lora_path") from error
        with self._locked() as folders:
            if name in folders and not anew:
                raise RequestError(f"The lora adapter '{printable(name)}' has already been loaded.", param="lora_name")
            self._write({**folders, name: str(path)})

    def remove(self, name: str) -> None:
        """Remove an added adapter from all gateways. Raises `RequestError`. Blocks."""
        if name in self._configured:
            raise RequestError(f"`{printable(name)}` is one of the configuration (model.lora).", param="lora_name")
        with self._locked() as folders:
            if name not in folders:
                raise _unknown(name)
            self._write({each: folder for each, folder in folders.items() if each != name})

    @cached_property
    def _geometry(self) -> ModelGeometry:
        from cohort.common.engine.config.model_config import read_geometry

        return read_geometry(self._model)

    def _checked(self, name: str, folder: Path) -> tuple[str, Path]:
        from cohort.common.engine.config.lora_checkpoint import check_lora, stamped_name

        (checkpoint,) = check_lora({name: str(folder)}, self._geometry)
        return stamped_name(checkpoint), folder

    def _current(self) -> dict[str, tuple[str, Path]]:
        """Return the added adapters. A file that fits no more, after a restart say, is left out and logged."""
        try:
            found = self._file.stat()
        except FileNotFoundError:
            return {}
        stamp = found.st_ino, found.st_mtime_ns
        if stamp != self._stamp:
            self._stamp, self._added = stamp, {}
            for name, folder in _folders(self._file).items():
                try:
                    self._added[name] = self._checked(name, Path(folder))
                except ModelError as error:
                    self._log.error("an added LoRA adapter is not served", adapter=name, reason=str(error))
        return self._added

    def _locked(self) -> _Locked:
        private_folder(self._file.parent)
        return _Locked(self._file)

    def _write(self, folders: Mapping[str, str]) -> None:
        write_private(self._file, msgspec.json.encode(folders))


class _Locked:
    """The folders of a file, which no other gateway changes meanwhile."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor = -1

    def __enter__(self) -> dict[str, str]:
        self._descriptor = os.open(self._file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return _folders(self._file)

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _folders(file: Path) -> dict[str, str]:
    try:
        return _read(file.read_bytes())
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise RequestError(f"{file.name} is damaged: {error}", status=503) from error


def _unknown(name: str) -> RequestError:
    why = f"The lora adapter '{printable(name)}' cannot be found."
    return RequestError(why, status=404, param="lora_name", code="model_not_found")
