"""From labels to one machine: every shape that exporters print, and never a guess."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from nodemend.application.open_incident import nodes_named
from nodemend.domain.faults import Family
from nodemend.domain.findings import Evidence, Finding, Sample, gpu_uuid_of, node_names_of, xid_of
from nodemend.domain.incidents import DrainRecord, IncidentState, Outcome
from nodemend.domain.policy import ClusterPolicy
from nodemend.domain.rules import findings_of
from tests.fakes.system import START
from tests.unit.application import run
from tests.unit.application.stage import (
    CLUSTER,
    CLUSTER_POLICY,
    Stage,
    catalogue,
    enforce,
    instance_id,
    node_name,
    samples,
    xid_finding,
    xid_labels,
)

NODE = node_name(1)
EXPORTER = "nvidia-dcgm-exporter-cwbcm"
GPU = {"gpu": "3", "UUID": "GPU-1-3"}


def finding_of(labels: Mapping[str, str]) -> Finding:
    """Judge a sample of the XID count as a scan does."""
    sample = Sample({**labels, "xid": "79"}, 1.0, START)
    (finding,) = findings_of(
        catalogue().rule("xid-count"), (sample,), cluster=CLUSTER, query="q", xids=catalogue().xids
    )
    return finding


def rejected(stage: Stage) -> str:
    """Return why nothing was opened; nothing was touched either."""
    (event,) = stage.events("Incident Rejected")
    assert event["reason"]["code"] == "unresolved_node"
    assert stage.mutations() == []
    assert stage.events("Incident Opened") == []
    text: str = event["reason"]["text"]
    return text


SHAPES = {
    "exporter up to 4.5.3": {**GPU, "Hostname": NODE, "modelName": "NVIDIA H100"},
    "exporter since May 2026": {**GPU, "hostname": NODE},
    "relabelled, exporter without NODE_NAME": {**GPU, "node": NODE, "Hostname": EXPORTER},
    "relabelled under another name": {**GPU, "kubernetes_node": NODE, "Hostname": EXPORTER},
    "relabelled by the operator": {**GPU, "node": NODE, "hostname": EXPORTER},
    "hostname removed with -n": {**GPU, "node_name": NODE},
    "old namespace": {"gpu": "3", "uuid": "GPU-1-3", "Hostname": NODE, "pod_name": "train-0"},
    "link metrics": {
        "gpu": "3",
        "gpu_uuid": "GPU-1-3",
        "model_name": "NVIDIA H100",
        "nvlink": "0",
        "nvswitch": "",
        "Hostname": NODE,
    },
    "labels of the exporter honoured": {**GPU, "Hostname": NODE, "pod": "train-0"},
    "labels of the exporter not honoured": {
        **GPU,
        "Hostname": NODE,
        "pod": EXPORTER,
        "exported_pod": "train-0",
    },
    "MIG": {**GPU, "Hostname": NODE, "GPU_I_ID": "7", "GPU_I_PROFILE": "1g.10gb"},
    "neuron": {"instance_id": instance_id(1), "neuron_device_index": "3"},
    "neuron, relabelled": {"instance_id": instance_id(1), "node": NODE},
}


@pytest.mark.case("D11")
@pytest.mark.case("D12")
@pytest.mark.parametrize("shape", SHAPES)
def test_d11_d12_every_label_shape_means_its_node(shape: str) -> None:
    stage = Stage()

    incident_id = run.open_for(stage, finding_of(SHAPES[shape]))

    assert incident_id is not None
    assert stage.incident(incident_id).node.uid == "uid-1"


@pytest.mark.parametrize("shape", [name for name in SHAPES if "neuron" not in name])
def test_the_gpu_is_the_physical_one_in_every_shape(shape: str) -> None:
    assert gpu_uuid_of(SHAPES[shape]) == "GPU-1-3"


@pytest.mark.case("D12")
def test_d12_half_of_the_fleet_prints_hostname_and_no_node_drops_out() -> None:
    stage = Stage()
    old, new = xid_labels(1, 79, 3), xid_labels(2, 79, 3)
    new["hostname"] = new.pop("Hostname")
    stage.metrics.answer("xid-count", samples(old, new))

    assert run.scan(stage, Family.ECC).announced == 2

    names = {d["findings"][0]["node_names"][0] for d in stage.events("GPU Fault Detected")}
    assert names == {node_name(1), node_name(2)}


UNRESOLVED = {
    "exporter's pod only": {**GPU, "Hostname": EXPORTER},
    "no label at all": GPU,
    "address of the exporter": {**GPU, "instance": "10.0.1.1:9400"},
    "short name": {**GPU, "Hostname": "ip-10-0-1-1"},
    "name with a port": {**GPU, "node": f"{NODE}:9400"},
    "upper case": {**GPU, "Hostname": NODE.upper()},
    "instance of nobody": {"instance_id": "i-0ffffffffffffffff", "neuron_device_index": "0"},
    "empty": {**GPU, "node": "", "Hostname": ""},
}


@pytest.mark.case("D11")
@pytest.mark.parametrize("shape", UNRESOLVED)
def test_d11_what_names_no_node_is_reported_and_touches_none(shape: str) -> None:
    stage = Stage()

    assert run.open_for(stage, finding_of(UNRESOLVED[shape])) is None

    assert "no node is named" in rejected(stage)


@pytest.mark.case("D11")
def test_d11_labels_that_name_two_nodes_are_ambiguous_and_touch_neither() -> None:
    stage = Stage()
    labels = {**GPU, "node": node_name(1), "Hostname": node_name(2)}

    assert run.open_for(stage, finding_of(labels)) is None

    text = rejected(stage)
    assert "labels name 2 nodes" in text
    assert node_name(1) in text
    assert node_name(2) in text


def test_a_name_and_an_instance_of_another_node_are_ambiguous() -> None:
    stage = Stage()
    found = nodes_named(stage.cluster, [node_name(1), instance_id(2)])
    assert [node.ref.uid for node in found] == ["uid-1", "uid-2"]


def test_gpus_whose_uuid_was_dropped_are_told_apart_by_node_and_index() -> None:
    stage = Stage()
    rows = [{k: v for k, v in xid_labels(n, 79, 3).items() if k != "UUID"} for n in (1, 2)]
    stage.metrics.answer("xid-count", samples(*rows, {**rows[0], "gpu": "4"}))

    assert run.scan(stage, Family.ECC).announced == 2

    found = [d["findings"] for d in stage.events("GPU Fault Detected")]
    assert [[f["gpu_index"] for f in findings] for findings in found] == [["3", "4"], ["3"]]


# --- the second look ------------------------------------------------------------------------------


@pytest.mark.case("D11")
def test_d11_a_name_that_is_no_nodes_does_not_lend_one_nodes_fault_to_another() -> None:
    """Without UUIDs, and under one pod name, only the relabelled node tells the GPUs apart."""
    mine = {"node": node_name(1), "Hostname": "exporter", "gpu": "3", "xid": "79"}
    stage = Stage(policy=enforce())
    finding = xid_finding(
        node_names=(node_name(1), "exporter"),
        gpu_uuid="",
        evidence=Evidence("xid-count", "q", 1, START, mine),
    )
    request = stage.put(IncidentState.VERIFYING, findings=(finding,))
    stage.metrics.answer("xid-count", samples({**mine, "node": node_name(2)}))

    assert run.verify(stage, request).next == "close"

    verdict = stage.incident(request.incident_id).verdict
    assert verdict is not None
    assert (verdict[0], verdict[1].code) == (Outcome.SKIPPED, "not_confirmed")


def neuron_finding(number: int) -> Finding:
    labels = {"instance_id": instance_id(number), "neuron_device_index": "3", "xid": "79"}
    return xid_finding(
        number,
        node_names=(instance_id(number),),
        gpu_uuid="",
        evidence=Evidence("xid-count", "q", 1, START, labels),
    )


def test_a_fault_that_names_an_instance_only_is_confirmed_on_its_node() -> None:
    stage = Stage(policy=enforce())
    finding = neuron_finding(1)
    request = stage.put(IncidentState.VERIFYING, findings=(finding,))
    stage.metrics.answer("xid-count", samples(dict(finding.evidence.labels)))

    assert run.verify(stage, request).next == "cordon"


def test_a_fault_that_names_another_instance_is_not_confirmed() -> None:
    stage = Stage(policy=enforce())
    request = stage.put(IncidentState.VERIFYING, findings=(neuron_finding(1),))
    stage.metrics.answer("xid-count", samples(dict(neuron_finding(2).evidence.labels)))

    assert run.verify(stage, request).next == "close"


def test_a_new_node_whose_instance_is_named_sick_is_not_clean() -> None:
    stage = Stage(policy=enforce(hold_down_s=0))
    request = stage.put(IncidentState.REPAIRING, drain=DrainRecord(START, is_drained=True))
    run.start(stage, request)
    stage.replace_node()
    assert run.check(stage, request).next == "validate"
    stage.metrics.answer("xid-count", samples(dict(neuron_finding(9).evidence.labels)))

    assert run.validate(stage, request).next == "wait"


# --- two clusters ---------------------------------------------------------------------------------


def test_a_node_of_another_cluster_is_no_node_of_this_one() -> None:
    """In a shared workspace without a matcher the scan sees the other cluster's faults, too."""
    stage = Stage(policy=enforce(clusters=(CLUSTER_POLICY,)))
    assert run.open_for(stage, xid_finding(node_names=("ip-10-9-9-9.ec2.internal",))) is None
    assert "ip-10-9-9-9.ec2.internal" in rejected(stage)


@pytest.mark.parametrize(
    ("reporting", "following"), [(8, "cordon"), (7, "cordon"), (9, "wait"), (16, "wait")]
)
def test_a_name_under_which_two_machines_report_confirms_nothing(
    reporting: int, following: str
) -> None:
    stage = Stage(policy=enforce())
    request = stage.put(IncidentState.VERIFYING, findings=(xid_finding(),))
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    stage.metrics.answer("identity", samples({}, value=reporting))

    assert run.verify(stage, request).next == following

    assert stage.mutations() == []
    (asked,) = [asked for asked in stage.metrics.asked if asked.key == "identity"]
    assert f'Hostname="{NODE}"' in asked.query
    assert asked.at == START, "an event is about the machine of then"


def test_a_name_of_two_machines_ends_unverifiable_and_says_what_to_do() -> None:
    stage = Stage(policy=enforce())
    request = stage.put(IncidentState.VERIFYING, findings=(xid_finding(),))
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    stage.metrics.answer("identity", samples({}, value=16))

    while (result := run.verify(stage, request)).next == "wait":
        stage.clock.advance(result.wait_s)

    verdict = stage.incident(request.incident_id).verdict
    assert verdict is not None
    assert (verdict[0], verdict[1].code) == (Outcome.SKIPPED, "unverifiable")
    assert "16 GPUs report under the name" in verdict[1].text
    assert "matcher" in verdict[1].text


def test_whether_two_machines_report_under_a_name_can_be_unknown() -> None:
    stage = Stage(policy=enforce())
    request = stage.put(IncidentState.VERIFYING, findings=(xid_finding(),))
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    stage.metrics.fail("amp_timeout", matches="identity")

    assert run.verify(stage, request).next == "wait"


def test_the_matcher_of_the_cluster_is_in_the_question_whose_gpus_report() -> None:
    shared = ClusterPolicy(CLUSTER, "ws-1", "eu-central-1", matcher='cluster="gpu-prod"')
    stage = Stage(policy=enforce(clusters=(shared,)))
    request = stage.put(IncidentState.VERIFYING, findings=(xid_finding(),))
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))

    assert run.verify(stage, request).next == "cordon"

    (asked,) = [asked for asked in stage.metrics.asked if asked.key == "identity"]
    assert 'cluster="gpu-prod"' in asked.query


def test_an_instance_type_that_nobody_knows_is_not_counted() -> None:
    stage = Stage(policy=enforce())
    stage.cluster.change_node(NODE, lambda node: replace(node, labels={"pool": "h100"}))
    request = stage.put(IncidentState.VERIFYING, findings=(xid_finding(),))
    stage.metrics.answer("xid-count", samples(xid_labels(1, 79, 3)))
    stage.metrics.answer("identity", samples({}, value=99))

    assert run.verify(stage, request).next == "cordon"


# --- codes in labels ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["9" * 5000, "1024", "0", "79x", "seventy-nine", "²"])
def test_a_code_that_is_none_is_not_replaced_by_how_often_it_came(text: str) -> None:
    assert xid_of(Sample({"xid": text}, 3.0, START)) is None


def test_names_are_told_best_first_and_once() -> None:
    labels = {"instance_id": "i-1", "Hostname": "a", "node": "b", "hostname": "a"}
    assert node_names_of(labels) == ("b", "a", "i-1")
