"""The official Python client against the emulator, over TLS with a bearer token."""

import contextlib
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from local.calls import ApiFault, CallLog, FaultPlan
from local.kubernetes import KubernetesEmulator, Rbac, Rule, StaticTokens, Timings, User
from local.kubernetes.resources import PDBS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import kubernetes
    from kubernetes.client import ApiException

NODE = "ip-10-0-1-5.ec2.internal"
OTHER = "ip-10-0-1-6.ec2.internal"
TOKEN = "a-token-of-the-drain-function"
RULES = [
    Rule(("get", "list", "patch"), ("nodes",)),
    Rule(("get", "list"), ("pods",)),
    Rule(("create",), ("pods/eviction",)),
]
TIMEOUT = (2, 6)


@pytest.fixture
def cluster() -> Iterator[KubernetesEmulator]:
    emulator = KubernetesEmulator(
        "training",
        StaticTokens({TOKEN: User("drain_node", ("nodemend",))}),
        Rbac.of_users({"drain_node": RULES}),
        calls=CallLog(),
        faults=FaultPlan(),
        timings=Timings(start_s=0.05, termination_s=0.1, orphan_s=0.1),
    )
    emulator.add_node(NODE, instance_id="i-0aaaaaaaaaaaaaaa1")
    emulator.add_node(OTHER, instance_id="i-0aaaaaaaaaaaaaaa2")
    with emulator:
        yield emulator


@pytest.fixture
def api_client(
    cluster: KubernetesEmulator, tmp_path: Path
) -> Iterator[kubernetes.client.ApiClient]:
    authority = tmp_path / "ca.pem"
    authority.write_text(cluster.ca_pem)
    configuration = kubernetes.client.Configuration()
    configuration.host = cluster.url
    configuration.ssl_ca_cert = str(authority)
    configuration.api_key = {"authorization": f"Bearer {TOKEN}"}
    configuration.retries = False
    with kubernetes.client.ApiClient(configuration) as client:
        yield client
        client.rest_client.pool_manager.clear()


@pytest.fixture
def core(api_client: kubernetes.client.ApiClient) -> kubernetes.client.CoreV1Api:
    return kubernetes.client.CoreV1Api(api_client)


def eviction(namespace: str, name: str, uid: str) -> kubernetes.client.V1Eviction:
    return kubernetes.client.V1Eviction(
        api_version="policy/v1",
        kind="Eviction",
        metadata=kubernetes.client.V1ObjectMeta(name=name, namespace=namespace),
        delete_options=kubernetes.client.V1DeleteOptions(
            preconditions=kubernetes.client.V1Preconditions(uid=uid)
        ),
    )


def eventually(holds, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)


def test_a_node_is_cordoned_drained_and_uncordoned(cluster, core):
    cluster.add_workload("Deployment", "ml", "train", 1, nodes=[NODE])
    cluster.add_daemonset("gpu", "exporter")

    nodes = core.list_node(_request_timeout=TIMEOUT)
    assert [node.metadata.name for node in nodes.items] == [NODE, OTHER]
    assert nodes.items[0].status.allocatable["nvidia.com/gpu"] == "8"
    assert nodes.items[0].spec.provider_id == "aws:///us-east-1a/i-0aaaaaaaaaaaaaaa1"

    cordon = [
        {"op": "test", "path": "/metadata/uid", "value": nodes.items[0].metadata.uid},
        {"op": "add", "path": "/spec/unschedulable", "value": True},
    ]
    assert core.patch_node(NODE, cordon, _request_timeout=TIMEOUT).spec.unschedulable is True
    eventually(lambda: core.read_node(NODE, _request_timeout=TIMEOUT).spec.taints)
    assert core.read_node(NODE).spec.taints[0].key == "node.kubernetes.io/unschedulable"

    selector = f"spec.nodeName={NODE}"
    pods = core.list_pod_for_all_namespaces(field_selector=selector, _request_timeout=TIMEOUT).items
    assert [(pod.metadata.namespace, pod.metadata.owner_references[0].kind) for pod in pods] == [
        ("gpu", "DaemonSet"),
        ("ml", "ReplicaSet"),
    ]
    train = pods[1].metadata
    core.create_namespaced_pod_eviction(
        train.name, "ml", eviction("ml", train.name, train.uid), _request_timeout=TIMEOUT
    )

    def moved() -> bool:
        found = core.list_namespaced_pod("ml", _request_timeout=TIMEOUT).items
        return [(pod.spec.node_name, pod.status.phase) for pod in found] == [(OTHER, "Running")]

    eventually(moved)
    core.patch_node(NODE, [{"op": "remove", "path": "/spec/unschedulable"}])
    eventually(lambda: not core.read_node(NODE).spec.taints)
    mutations = [(c.verb, c.target, c.caller, c.status) for c in cluster.calls.mutations()]
    assert mutations == [
        ("patch", f"nodes/{NODE}", "drain_node", 200),
        ("evict", f"pods/ml/{train.name}", "drain_node", 201),
        ("patch", f"nodes/{NODE}", "drain_node", 200),
    ]


def test_a_budget_blocks_an_eviction_with_429_and_its_cause(cluster, core):
    [name] = cluster.add_workload("StatefulSet", "ml", "web", 1, nodes=[NODE])
    cluster.add_pdb("ml", "web", min_available=1, match_labels={"app": "web"})
    uid = cluster.pods(namespace="ml")[0]["metadata"]["uid"]
    eventually(lambda: "observedGeneration" in pdb_status(cluster))

    with pytest.raises(ApiException) as refused:
        core.create_namespaced_pod_eviction(name, "ml", eviction("ml", name, uid))

    assert refused.value.status == 429
    assert "Retry-After" not in refused.value.headers
    assert "The disruption budget web needs 1 healthy pods and has 1 currently" in (
        refused.value.body
    )


def pdb_status(cluster: KubernetesEmulator) -> dict[str, object]:
    return dict(cluster.objects(PDBS)[0]["status"])


def test_the_real_client_pages_through_two_thousand_nodes(cluster, api_client, core):
    for number in range(1998):
        name = f"ip-10-{number >> 8}-{number & 255}-9.ec2.internal"
        cluster.add_node(name, instance_id=f"i-{number:017x}")
    seen: list[str] = []
    token = None
    began = time.monotonic()
    while True:
        # Raw JSON, as the product reads a fleet: with models it would be hundreds of megabytes.
        response = core.list_node(limit=500, _continue=token, _preload_content=False)
        page = json.loads(response.data)
        seen += [item["metadata"]["name"] for item in page["items"]]
        token = page["metadata"].get("continue")
        if not token:
            break
    assert len(set(seen)) == 2000
    assert seen == sorted(seen)
    # Four pages take about half a second; the bound leaves room for a busy machine.
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("status", [401, 403, 404, 409, 429, 500, 503, 504])
def test_an_injected_fault_is_answered_instead_of_the_call(cluster, core, status):
    cluster.add_bare_pod("ml", "train-0", node=NODE)
    fault = ApiFault(verb="evict", status=status, caller="drain_node", times=1)
    cluster.faults.add(fault)
    uid = cluster.pods(namespace="ml")[0]["metadata"]["uid"]

    with pytest.raises(ApiException) as failed:
        core.create_namespaced_pod_eviction("train-0", "ml", eviction("ml", "train-0", uid))
    assert failed.value.status == status
    assert failed.value.headers.get("Retry-After") == ("1" if status == 429 else None)
    assert "deletionTimestamp" not in cluster.pods(namespace="ml")[0]["metadata"]
    assert cluster.calls.mutations() == []

    core.create_namespaced_pod_eviction("train-0", "ml", eviction("ml", "train-0", uid))
    assert [call.verb for call in cluster.calls.mutations()] == ["evict"]


def test_faults_carry_their_own_body_and_headers(cluster, core):
    cluster.faults.add(
        ApiFault(verb="list", status=502, headers={"X-Proxy": "yes"}, body="bad gateway")
    )
    with pytest.raises(ApiException) as failed:
        core.list_node()
    assert (failed.value.status, failed.value.body) == (502, "bad gateway")
    assert failed.value.headers["X-Proxy"] == "yes"


def test_the_certificate_of_another_authority_is_refused(cluster, tmp_path):
    configuration = kubernetes.client.Configuration()
    configuration.host = cluster.url
    configuration.retries = False
    with kubernetes.client.ApiClient(configuration) as client:
        with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
            kubernetes.client.CoreV1Api(client).list_node(_request_timeout=TIMEOUT)
        with contextlib.suppress(AttributeError):
            client.rest_client.pool_manager.clear()
