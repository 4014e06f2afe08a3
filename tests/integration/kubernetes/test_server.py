"""The emulator as a server: many callers at once, faults, the record of calls, life cycle."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from local.calls import ApiFault
from local.kubernetes import (
    ADMIN_GROUP,
    Binding,
    KubernetesEmulator,
    Rbac,
    Rule,
    StaticTokens,
    Timings,
    User,
)
from tests.integration.kubernetes.replay import ApiUnderTest

NODE = "ip-10-0-1-5.ec2.internal"
JSON_PATCH = "application/json-patch+json"
USERS = {
    "admin": User("person", (ADMIN_GROUP,)),
    "drain": User("drain_node", ("nodemend",)),
    "nobody": User("nobody"),
}
ROLE = Binding(
    rules=(Rule(("get", "list", "patch"), ("nodes",)), Rule(("create",), ("pods/eviction",))),
    groups=("nodemend",),
)


@pytest.fixture
def cluster() -> Iterator[KubernetesEmulator]:
    emulator = KubernetesEmulator(
        "training",
        StaticTokens(USERS),
        Rbac([ROLE]),
        timings=Timings(start_s=0.05, termination_s=0.05),
    )
    emulator.add_node(NODE, instance_id="i-0aaaaaaaaaaaaaaa1")
    with emulator:
        yield emulator


@pytest.fixture
def api(cluster: KubernetesEmulator) -> Iterator[ApiUnderTest]:
    under_test = ApiUnderTest(cluster.url, cluster.ca_pem, {name: name for name in USERS})
    yield under_test
    under_test.close()


def annotate(value: str) -> list[dict[str, object]]:
    return [{"op": "add", "path": "/metadata/annotations/nodemend~1incident", "value": value}]


def test_rights_come_by_group_and_are_told_apart_by_subresource(api: ApiUnderTest) -> None:
    path = f"/api/v1/nodes/{NODE}"
    assert api.send("GET", path, caller="drain").status == 200
    assert api.send("GET", path, caller="nobody").status == 403
    assert api.send("DELETE", path, caller="drain").status == 403
    review: dict[str, Any] = {
        "spec": {"resourceAttributes": {"verb": "create", "resource": "pods"}},
    }
    reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    options: dict[str, Any] = {"content_type": "application/json", "caller": "drain"}
    plain = api.send("POST", reviews, body=review, **options)
    assert plain.body["status"] == {"allowed": False}
    review["spec"]["resourceAttributes"]["subresource"] = "eviction"
    evicting = api.send("POST", reviews, body=review, **options)
    assert evicting.body["status"]["allowed"] is True
    assert 'to Group "nodemend"' in evicting.body["status"]["reason"]


def test_only_accepted_changes_count_as_mutations(
    api: ApiUnderTest, cluster: KubernetesEmulator
) -> None:
    path = f"/api/v1/nodes/{NODE}"
    patch: dict[str, Any] = {"content_type": JSON_PATCH, "caller": "drain"}
    api.send("PATCH", path, body=annotate("a"), query={"dryRun": "All"}, **patch)
    api.send("PATCH", path, body=annotate("a"), **patch)
    api.send("PATCH", path, body=annotate("a"), **patch)
    api.send("PATCH", path, body=[{"op": "test", "path": "/metadata/uid", "value": "x"}], **patch)
    api.send("DELETE", path, caller="drain")
    api.send("GET", path, caller="stranger")
    seen = [(c.verb, c.target, c.caller, c.status, c.is_mutation) for c in cluster.calls.calls()]
    assert seen == [
        ("patch", f"nodes/{NODE}", "drain_node", 200, False),
        ("patch", f"nodes/{NODE}", "drain_node", 200, True),
        ("patch", f"nodes/{NODE}", "drain_node", 200, False),
        ("patch", f"nodes/{NODE}", "drain_node", 422, False),
        ("delete", f"nodes/{NODE}", "drain_node", 403, False),
        ("get", f"nodes/{NODE}", "system:anonymous", 403, False),
    ]


def test_an_injected_403_looks_like_a_missing_right(
    api: ApiUnderTest, cluster: KubernetesEmulator
) -> None:
    cluster.add_bare_pod("ml", "train-0", node=NODE)
    cluster.faults.add(ApiFault(verb="evict", status=403, times=1))
    path = "/api/v1/namespaces/ml/pods/train-0/eviction"
    body = {"metadata": {"name": "train-0"}}
    options: dict[str, Any] = {"body": body, "content_type": "application/json", "caller": "drain"}
    refused = api.send("POST", path, **options)
    assert refused.status == 403
    assert refused.body["message"] == (
        'pods "train-0" is forbidden: User "drain_node" cannot create resource "pods/eviction" in '
        'API group "" in the namespace "ml"'
    )
    assert api.send("POST", path, **options).status == 201


def test_an_injected_429_without_body_is_throttling_not_a_budget(
    api: ApiUnderTest, cluster: KubernetesEmulator
) -> None:
    cluster.faults.add(ApiFault(verb="get", status=429, caller="drain_node", times=1))
    answer = api.send("GET", f"/api/v1/nodes/{NODE}", caller="drain")
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    assert "causes" not in answer.body["details"]


def test_many_threads_read_and_patch_at_once(
    api: ApiUnderTest, cluster: KubernetesEmulator
) -> None:
    for number in range(8):
        cluster.add_node(f"ip-10-0-7-{number}.ec2.internal", instance_id=f"i-{number:017x}")

    def work(number: int) -> int:
        path = f"/api/v1/nodes/ip-10-0-7-{number % 8}.ec2.internal"
        if number % 2:
            return api.send("GET", path).status
        return api.send("PATCH", path, body=annotate(str(number)), content_type=JSON_PATCH).status

    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(work, range(600)))
    assert set(statuses) == {200}
    # It takes less than a second here; the bound leaves room for a busy machine.
    assert time.monotonic() - began < 15
    assert len(cluster.calls.mutations()) == 300


def test_of_many_writers_with_the_same_version_one_wins(api: ApiUnderTest) -> None:
    path = f"/api/v1/nodes/{NODE}"
    version = api.send("GET", path).body["metadata"]["resourceVersion"]

    def write(number: int) -> int:
        patch = {
            "metadata": {"resourceVersion": version, "annotations": {"writer": str(number)}},
        }
        content_type = "application/merge-patch+json"
        return api.send("PATCH", path, body=patch, content_type=content_type).status

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(write, range(8)))
    assert sorted(statuses) == [200] + [409] * 7


def test_a_page_shows_the_state_of_the_first_page(
    api: ApiUnderTest, cluster: KubernetesEmulator
) -> None:
    for number in range(5):
        cluster.add_node(f"ip-10-0-9-{number}.ec2.internal", instance_id=f"i-{number:017x}")
    first = api.send("GET", "/api/v1/nodes", query={"limit": "3"}).body
    cluster.remove_node("ip-10-0-9-4.ec2.internal")
    cluster.add_node("ip-10-0-9-9.ec2.internal", instance_id="i-00000000000000009")
    token = first["metadata"]["continue"]
    rest = api.send("GET", "/api/v1/nodes", query={"limit": "3", "continue": token}).body
    assert [item["metadata"]["name"] for item in rest["items"]] == [
        "ip-10-0-9-2.ec2.internal",
        "ip-10-0-9-3.ec2.internal",
        "ip-10-0-9-4.ec2.internal",
    ]
    assert rest["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


def test_a_client_that_says_nothing_keeps_no_other_from_being_served(
    api: ApiUnderTest, cluster: KubernetesEmulator
) -> None:
    port = int(cluster.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)):
        assert api.send("GET", "/readyz").body == "ok"


def test_stop_ends_every_thread_and_a_second_stop_is_harmless(cluster: KubernetesEmulator) -> None:
    own = {"kubernetes-api", "kubernetes-controllers"}
    assert own <= {thread.name for thread in threading.enumerate()}
    cluster.stop()
    cluster.stop()
    assert not own & {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="start"):
        _ = cluster.url


def test_it_can_be_started_again_with_its_objects(cluster: KubernetesEmulator) -> None:
    cluster.stop()
    cluster.start()
    api = ApiUnderTest(cluster.url, cluster.ca_pem, {"admin": "admin"})
    names = [item["metadata"]["name"] for item in api.send("GET", "/api/v1/nodes").body["items"]]
    api.close()
    assert names == [NODE]


def test_a_watch_is_refused_in_so_many_words(api: ApiUnderTest) -> None:
    answer = api.send("GET", "/api/v1/nodes", query={"watch": "true"})
    assert answer.status == 501
    assert "not emulated" in json.dumps(answer.body)
