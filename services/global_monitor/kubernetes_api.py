"""Kubernetes' API server as a pod sees it: replicas of StatefulSets, and what holds a pod up.

Three calls with aiohttp, which is there anyway: a client library would bring hundreds of types for them. Token and
certificate are read for every call, because the kubelet renews them. Called by `kubernetes_orders.py`; decides nothing,
tries nothing twice.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from cohort.common.errors import CohortError, ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with token, ca.crt and namespace of a pod's service account, filled by the kubelet."""
CALL_S = 10.0
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_MERGE_PATCH = "application/merge-patch+json"
_Answer = TypeVar("_Answer")


class ApiError(CohortError):
    """`status` of HTTP; 0 = no answer. The message says what is missing."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def passes(self) -> bool:
        """Whether the error may be over by the next call."""
        return self.status in (0, 429) or self.status >= 500


# Of the objects, what is read here; fields that are zero are not sent.
class _Part(msgspec.Struct, frozen=True, rename="camel"):
    pass


class Meta(_Part, frozen=True):
    resource_version: str = ""
    deletion_timestamp: str | None = None


class ScaleSpec(_Part, frozen=True):
    replicas: int = 0


class Scale(_Part, frozen=True):
    """autoscaling/v1."""

    metadata: Meta
    spec: ScaleSpec = ScaleSpec()


class Condition(_Part, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class Waiting(_Part, frozen=True):
    reason: str = ""
    message: str = ""


class Terminated(_Part, frozen=True):
    exit_code: int = 0
    reason: str = ""


class ContainerState(_Part, frozen=True):
    waiting: Waiting | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Part, frozen=True):
    name: str
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodStatus(_Part, frozen=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(_Part, frozen=True):
    metadata: Meta
    status: PodStatus = PodStatus()

    @property
    def crashes(self) -> int:
        """Restarts of a container that the kubelet delays now (CrashLoopBackOff)."""
        waits = [each for each in self.status.container_statuses if _reason(each) == "CrashLoopBackOff"]
        return max((each.restart_count for each in waits), default=0)

    @property
    def problem(self) -> str:
        """Description of what holds it up, in Kubernetes' words."""
        status = self.status
        if self.metadata.deletion_timestamp is not None:
            return "the pod of that name is still being deleted"
        for each in status.conditions:
            if each.type == "PodScheduled" and each.status == "False":
                return f"no node takes the pod ({each.reason}): {each.message}"
        for container in status.container_statuses:
            if (waiting := container.state.waiting) is not None and waiting.reason:
                ended = container.last_state.terminated
                last = f", ended last with status {ended.exit_code} ({ended.reason})" if ended is not None else ""
                return f"container {container.name}: {waiting.reason}{last} {waiting.message}".rstrip()
        detail = f": {status.reason} {status.message}".rstrip() if status.reason else ""
        return f"the pod is {status.phase or 'unknown'}{detail}, and its worker is not ready"


def _reason(container: ContainerStatus) -> str:
    return container.state.waiting.reason if container.state.waiting is not None else ""


class _Failure(msgspec.Struct, frozen=True):
    """Status, as the API server answers what it refuses."""

    message: str = ""


class KubernetesApi:
    def __init__(self, url: str, account: Path, *, call_s: float = CALL_S) -> None:
        """`account`: folder of the service account. `call_s`: deadline of each call."""
        self._url = url
        self._account = account
        self._call_s = call_s
        self.namespace = _read(account / "namespace")

    @staticmethod
    def of_pod(environ: Mapping[str, str], account: Path | None = None) -> KubernetesApi:
        """Make the API from the pod's service account. Raises `ConfigError` if the pod has none."""
        account = account or ACCOUNT
        host = environ[_HOST]
        url = f"https://{f'[{host}]' if ':' in host else host}:{environ.get(_PORT, '443')}"
        missing = [name for name in ("token", "ca.crt", "namespace") if not (account / name).is_file()]
        if missing:
            raise ConfigError(
                "planner.mode: act on Kubernetes changes replicas of StatefulSets, and this pod has no service account "
                f"(no {', '.join(missing)} in {account}): add docker/kubernetes/components/planner, or set advise"
            )
        return KubernetesApi(url, account)

    async def scale(self, name: str) -> Scale:
        """Return the scale of a StatefulSet. This and the next two methods raise `ApiError`."""
        return await self._request("get", self._scale(name), f"statefulsets/scale {name}", Scale)

    async def set_replicas(self, name: str, replicas: int, version: str, *, dry: bool = False) -> None:
        """Set the replicas; 409 if the StatefulSet has another version. `dry`: only ask whether it would be done."""
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        path = self._scale(name) + ("?dryRun=All" if dry else "")
        await self._request("patch", path, f"statefulsets/scale {name}", Scale, body)

    async def pod(self, name: str) -> Pod:
        return await self._request("get", f"/api/v1/namespaces/{self.namespace}/pods/{name}", f"pods {name}", Pod)

    def _scale(self, name: str) -> str:
        return f"/apis/apps/v1/namespaces/{self.namespace}/statefulsets/{name}/scale"

    async def _request(
        self, verb: str, path: str, what: str, type_: type[_Answer], body: dict[str, Any] | None = None
    ) -> _Answer:
        try:
            tls = await asyncio.to_thread(ssl.create_default_context, cafile=str(self._account / "ca.crt"))
            headers = {"Authorization": f"Bearer {_read(self._account / 'token')}", "Accept": "application/json"}
            if body is not None:
                headers["Content-Type"] = _MERGE_PATCH
            data = msgspec.json.encode(body) if body is not None else None
            timeout = aiohttp.ClientTimeout(total=self._call_s)
            async with (
                aiohttp.ClientSession(trust_env=False, timeout=timeout) as session,
                session.request(
                    verb, self._url + path, data=data, headers=headers, ssl=tls, allow_redirects=False
                ) as answer,
            ):
                status, raw = answer.status, await answer.read()
        except TimeoutError as error:
            raise ApiError(self._silent(f"no answer within {self._call_s:g} s"), 0) from error
        except (OSError, aiohttp.ClientError) as error:
            raise ApiError(self._silent(str(error)), 0) from error
        if status != 200:
            raise ApiError(self._refused(status, verb, what, raw), status)
        try:
            return msgspec.json.decode(raw, type=type_)
        except msgspec.MsgspecError as error:
            raise ApiError(f"{self._url} is no API server of Kubernetes: {error}", 0) from error

    def _silent(self, why: str) -> str:
        return f"Kubernetes' API server {self._url} cannot be reached ({why}); do network policies let this pod out?"

    def _refused(self, status: int, verb: str, what: str, raw: bytes) -> str:
        try:
            detail = msgspec.json.decode(raw, type=_Failure).message
        except msgspec.MsgspecError:
            detail = ""
        match status:
            case 401:
                missing = f"the API server does not take the token in {self._account}"
            case 403:
                missing = f"a Role must let this pod's service account {verb} {what} in namespace {self.namespace}"
            case 404:
                missing = f"there is no {what} in namespace {self.namespace}"
            case 409:
                missing = f"{what} was changed meanwhile"
            case _:
                missing = f"the API server answers {verb} {what} with {status}"
        return f"{missing}: {detail}" if detail else missing


def in_pod(environ: Mapping[str, str]) -> bool:
    return bool(environ.get(_HOST))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()
