"""An API server of Kubernetes for tests: `scale` of StatefulSets, and pods, over TLS, as the real one answers.

Objects and patches are held against Kubernetes' own schemas; rights are those of the Role that is given; a write over
an old version is a conflict; numbers that are zero are not sent. What a controller and a kubelet would do is the test's
(`on_scaled`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from aiohttp import web
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from tests.certificates import make_certificate

NAMESPACE = "cohort"
TOKEN = "token-of-the-monitor"
RELEASE = kubernetes_validate.latest_version()
Object = dict[str, Any]


class StatefulSet:
    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.version = 100


class ApiServer:
    def __init__(self, role: Object, **replicas: int) -> None:
        """`role`: a Role of rbac.authorization.k8s.io/v1. `replicas` by StatefulSet, with _ for -."""
        self.role = role
        self.sets = {name.replace("_", "-"): StatefulSet(count) for name, count in replicas.items()}
        self.pods: dict[str, Object] = {}
        self.token = TOKEN
        self.writes: list[tuple[str, int]] = []
        """What was changed, in order."""
        self.calls: list[str] = []
        self.on_scaled: Callable[[str, int, int], None] = lambda name, before, after: None
        self.before_write: Callable[[str], None] = lambda name: None
        """Somebody else, just before a patch is taken."""
        self.lost_answers = 0
        """So many patches are taken and their connection broken."""
        self.unavailable = 0
        """So many calls are answered with 503."""
        self.slow_s = 0.0

    async def start(self, folder: Path) -> dict[str, str]:
        """Writes a service account into `folder`; the environment of a pod."""
        cert = make_certificate(folder)
        (folder / "ca.crt").write_text(cert.read_text())
        (folder / "token").write_text(self.token + "\n")
        (folder / "namespace").write_text(NAMESPACE)
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(cert, cert.with_suffix(".key"))
        app = web.Application()
        app.router.add_route(
            "*", "/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}/scale", self._answered(self._scale)
        )
        app.router.add_route("*", "/api/v1/namespaces/{namespace}/pods/{name}", self._answered(self._pod))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        port = self._runner.addresses[0][1]
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}

    async def stop(self) -> None:
        await self._runner.cleanup()

    def scale(self, name: str, replicas: int) -> None:
        """As anybody: `kubectl scale`."""
        found = self.sets[name]
        before, found.replicas, found.version = found.replicas, replicas, found.version + 1
        self.on_scaled(name, before, replicas)

    def touch(self, name: str) -> None:
        """Its status changed."""
        self.sets[name].version += 1

    def add_pod(self, name: str, **status: Any) -> Object:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "resourceVersion": "7"},
            "spec": {"containers": [{"name": "cohort", "image": "cohort:cuda"}]},
            "status": {"phase": "Pending", **status},
        }
        self.pods[name] = checked(pod)
        return pod

    # -- answers ---------------------------------------------------------------------------------------------------

    def _answered(self, handler: Callable[[web.Request, str], tuple[int, Object]]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            verb, name = request.method.lower(), request.match_info["name"]
            self.calls.append(f"{verb} {request.path_qs.rpartition('namespaces/cohort/')[2]}")
            await request.read()
            await asyncio.sleep(self.slow_s)
            status, body = self._refusal(request, verb, name) or handler(request, name)
            if status == 200 and verb == "patch" and self.lost_answers:
                self.lost_answers -= 1
                assert request.transport is not None
                request.transport.abort()
            return web.json_response(checked(body), status=status)

        return answer

    def _refusal(self, request: web.Request, verb: str, name: str) -> tuple[int, Object] | None:
        if self.unavailable:
            self.unavailable -= 1
            return failure(503, "ServiceUnavailable", "etcd has no leader")
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return failure(401, "Unauthorized", "Unauthorized")
        group, resource = ("apps", "statefulsets/scale") if request.path.endswith("/scale") else ("", "pods")
        if request.match_info["namespace"] != NAMESPACE or not self._may(verb, group, resource, name):
            return failure(
                403, "Forbidden", f'User "system:serviceaccount:cohort:x" cannot {verb} resource "{resource}"'
            )
        return None

    def _may(self, verb: str, group: str, resource: str, name: str) -> bool:
        return any(
            verb in rule["verbs"]
            and group in rule["apiGroups"]
            and resource in rule["resources"]
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self.role["rules"]
        )

    def _scale(self, request: web.Request, name: str) -> tuple[int, Object]:
        found = self.sets.get(name)
        if found is None:
            return failure(404, "NotFound", f'statefulsets.apps "{name}" not found')
        if request.method == "PATCH":
            if request.content_type != "application/merge-patch+json":
                return failure(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
            self.before_write(name)
            patch = json.loads(request._read_bytes or b"")
            wanted = checked(merged(scale_object(name, found), patch))
            if wanted["metadata"]["resourceVersion"] != str(found.version):
                return failure(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on statefulsets.apps "{name}": the object has been modified; '
                    "please apply your changes to the latest version and try again",
                )
            replicas = wanted["spec"].get("replicas", 0)
            if request.query.get("dryRun") != "All" and replicas != found.replicas:
                self.writes.append((name, replicas))
                self.scale(name, replicas)
        elif request.method != "GET":
            return failure(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        return 200, scale_object(name, found)

    def _pod(self, request: web.Request, name: str) -> tuple[int, Object]:
        if name not in self.pods:
            return failure(404, "NotFound", f'pods "{name}" not found')
        return 200, self.pods[name]


def scale_object(name: str, found: StatefulSet) -> Object:
    """autoscaling/v1; its version is the StatefulSet's."""
    counted = {"replicas": found.replicas} if found.replicas else {}
    return {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": f"uid-{name}",
            "resourceVersion": str(found.version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": counted,
        "status": {"replicas": found.replicas, "selector": f"app.kubernetes.io/component={name}"},
    }


def failure(code: int, reason: str, message: str) -> tuple[int, Object]:
    return code, {
        "apiVersion": "v1",
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def checked(body: Object) -> Object:
    """As Kubernetes' schema has it, with no other field."""
    _schema(body["kind"]).validate(body)
    return body


@functools.cache
def _schema(kind: str) -> jsonschema.Draft202012Validator:
    """Kept: what all kinds have in common is megabytes."""
    file = {"Pod": "pod-v1", "Scale": "scale-autoscaling-v1", "Status": "status-meta-v1"}[kind]
    own, common = (
        Resource.from_contents(schema_contents(f"kubernetes-json-schema/v{RELEASE}-local-strict/{name}.json", RELEASE))
        for name in (file, "_definitions")
    )
    registry: Registry[Any] = common @ (own @ Registry())
    return jsonschema.Draft202012Validator(own.contents, registry=registry)


def merged(base: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(base) if isinstance(base, dict) else {}
    for field, value in patch.items():
        if value is None:
            result.pop(field, None)
        else:
            result[field] = merged(result.get(field), value)
    return result


def pending(message: str) -> Object:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def crashing(restarts: int, exit_code: int = 1) -> Object:
    container = {
        "name": "cohort",
        "image": "cohort:cuda",
        "imageID": "",
        "ready": False,
        "restartCount": restarts,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}},
        "lastState": {"terminated": {"exitCode": exit_code, "reason": "Error"}},
    }
    return {"phase": "Running", "containerStatuses": [container]}
