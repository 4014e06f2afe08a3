"""Sets the scenes that the recorded exchanges assume.

Most of it is HTTP, as the recorded fixtures were: objects are made by the manager `setup`, and what
a kubelet would write is written with its user agent. What HTTP cannot do (hold a controller up,
let time pass) is the small interface `Controls`.
"""

import copy
from collections.abc import Mapping
from typing import Any, Protocol

from tests.integration.kubernetes.replay import ApiUnderTest, Replay, load

KUBELET = "kubelet/v1.36.2"
SETUP = "setup/1"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
NODE = "ip-10-0-1-5.ec2.internal"

_RECORDED_NODES = {item.name: item for item in load("nodes")}
_RECORDED_PODS = {item.name: item for item in load("pods")}
RUNNING = _RECORDED_PODS["pod-get-deployment-pod"].body["status"]
SUCCEEDED = _RECORDED_PODS["pod-get-job-pod-succeeded"].body["status"]


class Controls(Protocol):
    """What a scene needs beyond HTTP."""

    def settle(self) -> None:
        """Let the controllers do what they have to do now."""

    def pause(self, *controllers: str) -> None:
        """Hold controllers up."""

    def resume(self, *controllers: str) -> None:
        """Let them go on."""

    def advance(self, seconds: float) -> None:
        """Let time pass."""

    def silence(self, node: str) -> None:
        """Let a node's kubelet fall silent now."""

    def install(self, plural: str) -> None:
        """Install the definition of a custom resource."""

    def grant(self, is_granted: bool) -> None:
        """Give the user `dev` the role `nodemend`, or take it away."""


class Stage:
    """The hands that set a scene."""

    def __init__(self, replay: Replay, controls: Controls) -> None:
        self.replay = replay
        self.controls = controls

    @property
    def api(self) -> ApiUnderTest:
        return self.replay.api

    # ---------------------------------------------------------------- objects

    def call(self, method: str, path: str, *, agent: str = SETUP, **options: Any) -> Any:
        answer = self.api.send(method, path, user_agent=agent, **options)
        assert answer.status < 300, (method, path, answer.status, answer.body)
        return answer.body

    def create(self, path: str, body: Mapping[str, Any], agent: str = SETUP) -> Any:
        return self.call("POST", path, agent=agent, body=body, content_type="application/json")

    def patch(
        self,
        path: str,
        body: Any,
        *,
        agent: str = SETUP,
        content_type: str = MERGE_PATCH,
        **options: Any,
    ) -> Any:
        return self.call(
            "PATCH", path, agent=agent, body=body, content_type=content_type, **options
        )

    def namespace(self, name: str) -> None:
        if self.api.send("GET", f"/api/v1/namespaces/{name}").status == 404:
            self.create("/api/v1/namespaces", {"metadata": {"name": name}})

    def node(self, recorded: Mapping[str, Any] | None = None) -> Any:
        """Let a node join as its kubelet does; by default the first of the recordings."""
        if recorded is None:
            body = _RECORDED_NODES["node-create-not-ready"].request["body"]
            status = _RECORDED_NODES["node-status-patch-ready"].request["body"]
        else:
            meta = recorded["metadata"]
            annotations = {
                key: value
                for key, value in meta.get("annotations", {}).items()
                if key != "node.alpha.kubernetes.io/ttl"
            }
            body = {
                "metadata": {"name": meta["name"], "labels": meta["labels"]},
                "spec": {
                    key: value
                    for key, value in recorded["spec"].items()
                    if key in ("providerID", "taints", "unschedulable")
                },
            }
            body["metadata"]["annotations"] = annotations
            if "finalizers" in meta:
                body["metadata"]["finalizers"] = meta["finalizers"]
            status = {"status": recorded["status"]}
        made = self.create("/api/v1/nodes", body, agent=KUBELET)
        self.patch(
            f"/api/v1/nodes/{made['metadata']['name']}/status",
            status,
            agent=KUBELET,
            content_type=STRATEGIC_PATCH,
        )
        self.controls.settle()
        return made

    # ------------------------------------------------------------------- pods

    def pod(
        self,
        namespace: str,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        node: str | None = NODE,
        gpus: int = 0,
        status: Mapping[str, Any] | None = RUNNING,
        ready: bool = True,
        **fields: Any,
    ) -> Any:
        """Make a bare pod and post its status; `status` None leaves it Pending."""
        self.namespace(namespace)
        resources = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
        container = {
            "name": "main",
            "image": "registry.example.com/train:1.0",
            "resources": resources,
        }
        meta: dict[str, Any] = {"name": name, "labels": dict(labels or {"app": name})}
        meta |= {key: fields.pop(key) for key in ("finalizers", "annotations") if key in fields}
        spec = {"containers": [container], **fields}
        if node is not None:
            spec["nodeName"] = node
        made = self.create(f"/api/v1/namespaces/{namespace}/pods", {"metadata": meta, "spec": spec})
        if status is not None:
            self.post_status(namespace, name, _for_containers(status, made), ready=ready)
        self.controls.settle()
        return made

    def pod_like(self, recorded: Mapping[str, Any], agent: str = SETUP) -> Any:
        """Make a bare or mirror pod from a recorded answer: what the server added is left out."""
        meta = recorded["metadata"]
        namespace = meta["namespace"]
        self.namespace(namespace)
        spec = copy.deepcopy(recorded["spec"])
        for key in ("serviceAccountName", "serviceAccount", "priority", "preemptionPolicy"):
            spec.pop(key, None)
        spec["volumes"] = [
            volume
            for volume in spec.get("volumes", [])
            if not volume["name"].startswith("kube-api-access")
        ]
        for container in spec["containers"]:
            mounts = [
                mount
                for mount in container.get("volumeMounts", [])
                if not mount["name"].startswith("kube-api-access")
            ]
            container.pop("volumeMounts", None)
            if mounts:
                container["volumeMounts"] = mounts
        spec["tolerations"] = [
            toleration
            for toleration in spec.get("tolerations", [])
            if toleration.get("tolerationSeconds") != 300
        ]
        for key in ("volumes", "tolerations"):
            if not spec[key]:
                del spec[key]
        labels = {
            key: value
            for key, value in meta["labels"].items()
            if not key.startswith("topology.kubernetes.io/")
        }
        body = {
            "metadata": {"name": meta["name"], "labels": labels},
            "spec": spec,
        }
        for key in ("finalizers", "annotations", "ownerReferences"):
            if key in meta:
                body["metadata"][key] = self.replay.translation.to_actual(meta[key])
        made = self.create(f"/api/v1/namespaces/{namespace}/pods", body, agent=agent)
        self.replay.translation.learn(meta["uid"], made["metadata"]["uid"])
        if recorded["status"]["phase"] != "Pending":
            self.post_status(namespace, meta["name"], recorded["status"])
        self.controls.settle()
        return made

    def post_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, ready: bool = True
    ) -> None:
        """Write a pod's status with the kubelet's user agent."""
        posted = copy.deepcopy(dict(status))
        posted.pop("qosClass", None)
        posted["conditions"] = [
            condition
            for condition in posted.get("conditions", [])
            if condition["type"] != "DisruptionTarget"
        ]
        for condition in posted["conditions"]:
            if condition["type"] in ("Ready", "ContainersReady") and not ready:
                condition["status"] = "False"
        self.patch(
            f"/api/v1/namespaces/{namespace}/pods/{name}/status",
            {"status": posted},
            agent=KUBELET,
        )

    def confirm_deletion(self, namespace: str, name: str) -> None:
        """Delete a pod without grace, as its kubelet does in the end."""
        self.call(
            "DELETE",
            f"/api/v1/namespaces/{namespace}/pods/{name}",
            agent=KUBELET,
            body={"gracePeriodSeconds": 0},
            content_type="application/json",
        )
        self.controls.settle()

    def clear(self, namespace: str, *keep: str) -> None:
        """Remove all budgets and all pods but those to keep."""
        for budget in self.items(f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"):
            self.delete_budget(namespace, budget["metadata"]["name"])
        for pod in self.items(f"/api/v1/namespaces/{namespace}/pods"):
            if pod["metadata"]["name"] not in keep:
                if pod["metadata"].get("finalizers"):
                    self.patch(
                        f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}",
                        {"metadata": {"finalizers": None}},
                    )
                self.confirm_deletion(namespace, pod["metadata"]["name"])

    def items(self, path: str, **query: str) -> list[Any]:
        return list(self.call("GET", path, query=query)["items"])

    def run_pods(
        self, namespace: str, app: str, status: Mapping[str, Any] = RUNNING, unready: int = 0
    ) -> list[Any]:
        """Post the status of all Pending pods with a label `app`; the last ones are not ready."""
        self.controls.settle()
        pods = [
            pod
            for pod in self.items(
                f"/api/v1/namespaces/{namespace}/pods", labelSelector=f"app={app}"
            )
            if pod["status"]["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]
        ]
        for index, pod in enumerate(pods):
            self.post_status(
                namespace,
                pod["metadata"]["name"],
                _for_containers(status, pod),
                ready=index < len(pods) - unready,
            )
        self.controls.settle()
        return pods

    # -------------------------------------------------------------- workloads

    def workload(
        self,
        plural: str,
        namespace: str,
        name: str,
        spec: Mapping[str, Any],
        *,
        container: str = "main",
        image: str | None = None,
        **pod_spec: Any,
    ) -> Any:
        """Make a workload with one container, labelled `app=NAME`."""
        self.namespace(namespace)
        group = "batch" if plural == "jobs" else "apps"
        template = {
            "metadata": {"labels": {"app": name}},
            "spec": {
                "containers": [
                    {"name": container, "image": image or f"registry.example.com/{name}:1"}
                ],
                **pod_spec,
            },
        }
        body = {"metadata": {"name": name}, "spec": {"template": template, **spec}}
        if plural != "jobs":
            body["spec"]["selector"] = {"matchLabels": {"app": name}}
        made = self.create(f"/apis/{group}/v1/namespaces/{namespace}/{plural}", body)
        self.controls.settle()
        return made

    def deployment(
        self, namespace: str, name: str, replicas: int, *, unready: int = 0, run: bool = True
    ) -> None:
        self.workload("deployments", namespace, name, {"replicas": replicas})
        if run:
            self.run_pods(namespace, name, unready=unready)

    def budget(self, namespace: str, name: str, **spec: Any) -> Any:
        """Make a budget; `match` is short for the selector's matchLabels."""
        self.namespace(namespace)
        if "match" in spec:
            spec["selector"] = {"matchLabels": {"app": spec.pop("match")}}
        return self.create(
            f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
            {"metadata": {"name": name}, "spec": spec},
        )

    def change_budget(self, namespace: str, name: str, **spec: Any) -> None:
        self.patch(
            f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/{name}", {"spec": spec}
        )
        self.controls.settle()

    def delete_budget(self, namespace: str, name: str) -> None:
        self.call("DELETE", f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/{name}")


def _for_containers(status: Mapping[str, Any], pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded status with the names and images of this pod's containers."""
    fitting = copy.deepcopy(dict(status))
    for known, container in zip(
        fitting["containerStatuses"], pod["spec"]["containers"], strict=True
    ):
        known |= {"name": container["name"], "image": container["image"]}
    return fitting
