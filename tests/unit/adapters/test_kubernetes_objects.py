"""Reading and writing of Kubernetes JSON, with objects as a real API server sent them."""

import json
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client.api_client import ApiClient
from kubernetes.client.models.core_v1_event import CoreV1Event
from kubernetes.client.models.v1_eviction import V1Eviction

from nodemend.adapters._kubernetes_objects import (
    camel_case,
    disruption_budget_of,
    event_body,
    eviction_body,
    has_accelerators,
    node_of,
    pod_of,
)
from nodemend.adapters.kubernetes_cluster import ssl_context
from nodemend.domain.nodes import NodeRef, Readiness, Taint
from nodemend.domain.pods import Owner, Pod, PodFate, classify

EXCHANGES = json.loads(
    (Path(__file__).parents[2] / "data/kubernetes_client/exchanges.json").read_text()
)
AT = datetime(2026, 5, 1, 10, 30, 15, 123456, tzinfo=UTC)
REF = NodeRef("gpu-prod", "ip-10-0-1-5.ec2.internal", "uid-1", "i-0aaaaaaaaaaaaaaa1", "boot-1")


def body(name: str) -> dict[str, Any]:
    found: dict[str, Any] = EXCHANGES[name]["body"]
    return found


# --- nodes ----------------------------------------------------------------------------------------


def test_node_is_read_with_its_whole_identity():
    node = node_of(body("node-get"), "gpu-prod")
    assert node.ref.cluster == "gpu-prod"
    assert node.ref.name == "ip-10-0-1-5.ec2.internal"
    assert node.ref.uid == "669b0d4b-dce3-41f6-bed8-fba44b207960"
    assert node.ref.instance_id == "i-0aaaaaaaaaaaaaaa1"
    assert node.ref.boot_id == body("node-get")["status"]["nodeInfo"]["bootID"] != ""
    assert node.instance_type == "p5.48xlarge"
    assert (node.gpu_capacity, node.gpu_allocatable) == (8, 8)
    assert node.is_ready
    assert node.heartbeat_at is not None
    assert node.heartbeat_at.tzinfo is not None
    assert node.created_at == datetime(2026, 11, 30, 18, 37, 17, tzinfo=UTC)
    assert not node.is_unschedulable
    assert not node.is_deleting
    assert node.resource_version == "1347"


def test_node_without_conditions_is_unknown_and_not_ready():
    item = body("node-get-not-ready-without-conditions")
    node = node_of(item, "c")
    assert "conditions" not in item["status"]
    assert node.readiness is Readiness.UNKNOWN
    assert node.heartbeat_at is None
    assert (node.gpu_capacity, node.gpu_allocatable) == (0, 0)


def test_silent_node_is_unknown_and_keeps_its_last_heartbeat():
    node = node_of(body("node-get-silent-unreachable"), "c")
    assert node.readiness is Readiness.UNKNOWN
    assert node.heartbeat_at == datetime(2026, 11, 30, 18, 37, 56, tzinfo=UTC)


def test_taints_keep_order_and_time_so_that_a_patch_can_test_the_exact_list():
    item = body("node-get-cordoned-with-unschedulable-taint")
    node = node_of(item, "c")
    assert node.is_unschedulable
    assert [taint.as_json() for taint in node.taints] == item["spec"]["taints"]
    assert any(taint.time_added for taint in node.taints)


def test_taint_effect_that_is_not_known_survives_unchanged():
    item = {
        "metadata": {"name": "n"},
        "spec": {"taints": [{"key": "a", "effect": "NoBreathing", "value": "x"}]},
    }
    assert node_of(item, "c").taints == (Taint("a", "NoBreathing", "x"),)


def test_node_with_deletion_timestamp_is_deleting():
    assert node_of(body("node-get-deleting"), "c").is_deleting


def test_fargate_node_has_no_instance_id():
    item = {
        "metadata": {"name": "fargate-ip-10-0-1-5.ec2.internal"},
        "spec": {"providerID": "aws:///us-east-1a/ca-123/fargate-ip-10-0-1-5.ec2.internal"},
    }
    assert node_of(item, "c").ref.instance_id == ""


@pytest.mark.parametrize(
    ("quantity", "count"), [("8", 8), (8, 8), ("0", 0), (None, 0), ("garbage", 0)]
)
def test_gpu_count_is_read_from_the_quantity(quantity, count):
    item = {"metadata": {"name": "n"}, "status": {"capacity": {"nvidia.com/gpu": quantity}}}
    assert node_of(item, "c").gpu_capacity == count


@pytest.mark.parametrize(
    ("labels", "capacity"),
    [
        ({}, {"nvidia.com/gpu": "8"}),
        ({}, {"nvidia.com/gpu": "0"}),
        ({}, {"nvidia.com/gpu.shared": "32"}),
        ({}, {"nvidia.com/mig-1g.5gb": "7"}),
        ({}, {"aws.amazon.com/neuron": "16"}),
        ({}, {"aws.amazon.com/neuroncore": "128"}),
        ({"nvidia.com/gpu.present": "true"}, {}),
        ({"k8s.amazonaws.com/accelerator": "nvidia-h100"}, {}),
        ({"eks.amazonaws.com/instance-gpu-count": "8"}, {}),
        ({"karpenter.k8s.aws/instance-accelerator-count": "16"}, {}),
        ({"node.kubernetes.io/instance-type": "p5.48xlarge"}, {"cpu": "192"}),
    ],
)
def test_node_counts_as_accelerated_by_resource_label_or_type(labels, capacity):
    item = {"metadata": {"name": "n", "labels": labels}, "status": {"capacity": capacity}}
    assert has_accelerators(item, frozenset({"p5.48xlarge"}))


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"nvidia.com/gpu.present": "false"},
        {"node.kubernetes.io/instance-type": "m5.2xlarge"},
        {"karpenter.k8s.aws/instance-category": "m"},
        {"eks.amazonaws.com/nodegroup": "cpu"},
    ],
)
def test_node_without_any_sign_of_an_accelerator_is_left_out(labels):
    item = {"metadata": {"name": "n", "labels": labels}, "status": {"capacity": {"cpu": "8"}}}
    assert not has_accelerators(item, frozenset({"p5.48xlarge"}))


# --- pods -----------------------------------------------------------------------------------------


def test_daemonset_pod_is_read_with_its_controller_and_tolerations():
    pod = pod_of(body("pod-get-daemonset-pod"))
    assert pod.owner == Owner(
        "DaemonSet", "dcgm-exporter", "apps/v1", "e09311de-8c50-4b39-b249-014246c5671b"
    )
    assert (pod.tolerations[0].key, pod.tolerations[0].operator) == ("", "Exists")
    assert classify(pod, now=AT, is_node_unreachable=False).fate is PodFate.SKIP


def test_owner_that_is_no_controller_is_no_owner():
    item = {
        "metadata": {
            "name": "p",
            "namespace": "ml",
            "ownerReferences": [{"kind": "ConfigMap", "name": "x", "apiVersion": "v1"}],
        }
    }
    assert pod_of(item).owner is None


def test_mirror_pod_is_known_by_its_annotation():
    pod = pod_of(body("pod-get-mirror-pod"))
    assert classify(pod, now=AT, is_node_unreachable=False).fate is PodFate.SKIP


def test_terminating_pod_carries_the_end_of_its_grace_and_its_gpus():
    pod = pod_of(body("pod-get-terminating"))
    assert pod.deletion_at == datetime(2026, 11, 30, 18, 34, tzinfo=UTC)
    assert (pod.gpus, pod.node_name, pod.owner) == (8, "ip-10-0-1-5.ec2.internal", None)


def test_finished_and_unscheduled_pods_are_told_apart():
    assert pod_of(body("pod-get-job-pod-succeeded")).is_finished
    unscheduled = pod_of(body("pod-get-unscheduled"))
    assert (unscheduled.phase, unscheduled.node_name) == ("Pending", "")


def test_pod_of_a_silent_node_is_not_ready():
    assert not pod_of(body("pod-get-on-silent-node")).is_ready


def test_gpus_of_init_containers_count_only_where_they_need_more():
    def container(count: int) -> dict[str, Any]:
        return {"resources": {"limits": {"nvidia.com/gpu": str(count)}}}

    item = {
        "metadata": {"name": "p", "namespace": "ml"},
        "spec": {
            "containers": [container(2), container(1), {"resources": {}}],
            "initContainers": [container(1), container(4)],
        },
    }
    assert pod_of(item).gpus == 4


# --- disruption budgets ---------------------------------------------------------------------------


def test_budget_is_read_with_labels_expressions_and_counts():
    budget = disruption_budget_of(body("pdb-get-match-expressions"))
    assert budget.match_labels == {"app": "frozen"}
    assert budget.expressions == (
        ("tier", "DoesNotExist", ()),
        ("app", "In", ("frozen", "other")),
    )
    counts = (budget.expected_pods, budget.current_healthy, budget.desired_healthy)
    assert (*counts, budget.disruptions_allowed) == (2, 2, 1, 1)


def test_empty_selector_selects_all_and_an_absent_one_nothing():
    every = disruption_budget_of(body("pdb-get-empty-selector"))
    none = disruption_budget_of(body("pdb-get-no-selector"))
    pod = Pod(every.namespace, "p", "uid", "n", labels={"app": "x"})
    assert every.has_selector
    assert every.selects(pod)
    assert not none.has_selector
    assert not none.selects(Pod(none.namespace, "p", "uid", "n", labels={"app": "x"}))


def test_budget_that_the_server_has_not_processed_allows_nothing():
    budget = disruption_budget_of(body("pdb-get-not-processed"))
    assert budget.disruptions_allowed == 0


# --- what is sent ---------------------------------------------------------------------------------


@pytest.mark.case("R14")
@pytest.mark.case("R17")
def test_eviction_body_is_a_complete_policy_v1_eviction_with_the_uid_and_no_grace():
    sent = eviction_body(Pod("ml", "train-0", "uid-7", "n"))
    parsed = V1Eviction.from_dict(sent)
    assert parsed is not None
    # Nothing in it is unknown to policy/v1: the client's model gives it back as it was.
    assert ApiClient().sanitize_for_serialization(parsed) == sent
    assert (sent["apiVersion"], sent["kind"]) == ("policy/v1", "Eviction")
    assert sent["metadata"] == {"name": "train-0", "namespace": "ml"}
    assert sent["deleteOptions"]["preconditions"] == {"uid": "uid-7"}
    assert "gracePeriodSeconds" not in sent["deleteOptions"]


@pytest.mark.case("R69")
def test_event_is_found_by_kubectl_describe_node():
    sent = event_body(REF, "NodeCordoned", "why", is_warning=True, at=AT)
    assert sent["metadata"]["namespace"] == "default"
    assert sent["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Node",
        "name": REF.name,
        "uid": REF.uid,
    }
    assert (sent["type"], sent["source"]) == ("Warning", {"component": "nodemend"})
    assert sent["firstTimestamp"] == "2026-05-01T10:30:15Z"
    assert CoreV1Event.from_dict(sent) is not None


@pytest.mark.case("R69")
def test_event_is_cut_to_the_limits_of_the_api():
    sent = event_body(REF, "capacity_guard " * 30, "x" * 3000, is_warning=False, at=AT)
    assert len(sent["reason"]) == 128
    assert sent["reason"].startswith("CapacityGuardCapacityGuard")
    assert len(sent["message"]) == 1024


def test_event_has_one_name_however_often_and_whenever_it_is_made():
    first = event_body(REF, "A", "m", is_warning=False, at=AT)
    later = event_body(REF, "A", "m", is_warning=False, at=AT.replace(hour=11))
    other = event_body(REF, "A", "n", is_warning=False, at=AT)
    assert first["metadata"]["name"] == later["metadata"]["name"]
    assert first["metadata"]["name"] != other["metadata"]["name"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [("blocked_by_pdb", "BlockedByPdb"), ("NeedsHuman", "NeedsHuman"), ("a b-c", "ABC")],
)
def test_reason_becomes_camel_case(words, expected):
    assert camel_case(words) == expected


# --- TLS ------------------------------------------------------------------------------------------


def test_certificates_are_verified_but_not_by_the_strict_rules_that_eks_authorities_fail():
    context = ssl_context("")
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
