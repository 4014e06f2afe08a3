"""The events' details: one model for each detail-type, built by the steps and read by others."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from nodemend.adapters._aws import encode_detail
from nodemend.contracts.events import (
    EVENT_MODELS,
    MAX_EVENT_BYTES,
    Block,
    EventDetail,
    FaultEnvelope,
    GpuFaultDetected,
    IncidentDetail,
    RuleProblem,
    ScanBlind,
    incident_detail,
)
from nodemend.contracts.evidence import FindingModel, NodeRefModel, ReasonModel
from nodemend.domain.errors import InvalidInputError
from nodemend.domain.events import DetailType
from nodemend.domain.faults import FaultClass, FaultKind, Mode, Rung, Verdict
from nodemend.domain.findings import Evidence, Finding
from nodemend.domain.incidents import Incident, IncidentState, Origin, Outcome, close, record
from nodemend.domain.nodes import NodeRef
from nodemend.domain.reasons import Reason

NOW = datetime(2026, 5, 1, 10, 0, 0, 123456, tzinfo=UTC)
REF = NodeRef("c", "n1", "u1", "i-00000001", "b1")
FINDING = Finding(
    "c",
    ("n1", "pod"),
    FaultClass.XID,
    Verdict.FATAL,
    FaultKind.EVENT,
    Evidence("xid-count", 'x{a="b"} > 0', 0.1, NOW, {"gpu": "3"}),
    "GPU-1",
    "3",
    79,
    "XID 79: é, ⚠",
)
FOUND = (FindingModel.of(FINDING),)
BLOCK = Block(pod="ml/a", verdict="blocked_by_pdb", cause="none", budgets=("b",))
NEW = NodeRefModel.of(replace(REF, name="n9"))
WHY = Reason("why", "because")

DATA: Mapping[DetailType, dict[str, Any]] = {
    DetailType.INCIDENT_OPENED: {"origin": Origin.SCAN, "requested_by": "", "findings": FOUND},
    DetailType.INCIDENT_WAITING: {},
    DetailType.INCIDENT_ADMITTED: {
        "mode": Mode.ENFORCE,
        "plan": (Rung.REPLACE, Rung.HUMAN),
        "group": "g",
        "policy_version": "v1",
    },
    DetailType.INCIDENT_REJECTED: {"findings": FOUND},
    DetailType.INCIDENT_OVERDUE: {"state": "draining", "since": NOW, "remedy": "look"},
    DetailType.INCIDENT_ESCALATED: {"error": "ValueError"},
    DetailType.INCIDENT_CLOSED: {"remedy": "go", "replacement": NEW},
    DetailType.FAULT_VERIFIED: {"findings": FOUND},
    DetailType.APPROVAL_REQUESTED: {
        "number": 1,
        "before": "cordon",
        "rung": Rung.REPLACE,
        "rungs": (Rung.REPLACE,),
        "question": "May n1 be replaced?",
        "evidence": "rule xid-count",
        "until": NOW,
        "findings": FOUND,
    },
    DetailType.APPROVAL_ANSWERED: {
        "number": 1,
        "before": "cordon",
        "rungs": (Rung.REPLACE,),
        "answer": "no",
        "answered_by": "alice",
        "why": "not now",
    },
    DetailType.NODE_CORDONED: {
        "was_unschedulable": False,
        "evict": ("ml/a",),
        "evict_count": 1,
        "skip": ("ml/b: why",),
        "skip_count": 1,
    },
    DetailType.DRAIN_PROGRESS: {"blocked": (BLOCK,), "blocked_count": 1},
    DetailType.NODE_DRAINED: {
        "evicted_count": 3,
        "slices": 2,
        "drained_unconfirmed": ("ml/c",),
        "would_evict": ("ml/d",),
        "blocked": (BLOCK,),
    },
    DetailType.REPAIR_STARTED: {"rung": Rung.REPLACE, "group": "g", "desired_before": 4},
    DetailType.REPAIR_PROVEN: {"rung": Rung.REPLACE, "replacement": NEW, "gpus": 8},
    DetailType.NODE_RELEASED: {"is_uncordoned": True},
}


def incident(**changes: Any) -> Incident:
    values: dict[str, Any] = {
        "id": "inc-1",
        "cluster": "c",
        "node": REF,
        "origin": Origin.SCAN,
        "opened_at": NOW,
        "state": IncidentState.DRAINING,
        "state_since": NOW,
        "findings": (FINDING,),
        "mode": Mode.ENFORCE,
    }
    return Incident(**(values | changes))


def detail_of(detail_type: DetailType, data: Mapping[str, Any]) -> dict[str, Any]:
    recorded = record(incident(), detail_type, step="s", reason=WHY, now=NOW, data=data)
    return incident_detail(recorded, recorded.new_events[0])


def test_there_is_a_model_and_an_example_for_every_detail_type() -> None:
    assert set(EVENT_MODELS) == set(DetailType)
    incidents = {t for t, model in EVENT_MODELS.items() if issubclass(model, IncidentDetail)}
    assert set(DATA) == incidents
    for detail_type, model in EVENT_MODELS.items():
        assert vars(model)["DETAIL_TYPE"] is detail_type


@pytest.mark.parametrize("detail_type", DATA)
def test_an_incidents_event_goes_through_json_and_comes_back_as_it_was(
    detail_type: DetailType,
) -> None:
    detail = detail_of(detail_type, DATA[detail_type])

    text = json.dumps(detail)
    read = EVENT_MODELS[detail_type].model_validate_json(text)

    assert read.model_dump(mode="json", exclude_none=True) == detail
    assert detail["event_id"] == "inc-1-0001"
    assert datetime.fromisoformat(detail["occurred_at"]) == NOW
    assert detail["node"] == {
        "cluster": "c",
        "name": "n1",
        "uid": "u1",
        "instance_id": "i-00000001",
        "boot_id": "b1",
    }
    assert (detail["schema_version"], detail["incident_id"], detail["step"]) == (1, "inc-1", "s")
    assert (detail["dry_run"], detail["fault_class"]) == (False, "xid")
    assert detail["reason"] == {"code": "why", "text": "because"}
    assert "outcome" not in detail


@pytest.mark.parametrize("detail_type", DATA)
def test_every_field_of_an_event_but_the_common_ones_may_be_missing_or_is_given_by_the_step(
    detail_type: DetailType,
) -> None:
    for name, field in EVENT_MODELS[detail_type].model_fields.items():
        if name in IncidentDetail.model_fields or not field.is_required():
            continue
        data = {key: value for key, value in DATA[detail_type].items() if key != name}
        with pytest.raises(InvalidInputError, match=name):
            detail_of(detail_type, data)


def test_an_event_that_does_not_fit_its_model_is_found_before_it_is_stored() -> None:
    with pytest.raises(InvalidInputError, match="fix the step that records the event"):
        detail_of(DetailType.NODE_RELEASED, {"is_uncordoned": True, "more": 1})


def test_the_closing_event_carries_the_outcome() -> None:
    closed = close(incident(), Outcome.REPLACED, WHY, step="s", now=NOW)
    assert incident_detail(closed, closed.new_events[0])["outcome"] == "REPLACED"


@pytest.mark.parametrize(
    "finding",
    [
        FINDING,
        replace(FINDING, node_names=(), gpu_uuid="", gpu_index="", code=None, summary=""),
        replace(FINDING, verdict=Verdict.SUSPECT, kind=FaultKind.LEVEL),
        *(replace(FINDING, fault_class=fault_class) for fault_class in FaultClass),
    ],
)
def test_a_finding_goes_through_an_event_and_comes_back_as_it_was(finding: Finding) -> None:
    text = FindingModel.of(finding).model_dump_json()
    assert FindingModel.model_validate_json(text).to_finding("c") == finding


@pytest.mark.parametrize(
    "word", [{"verdict": "dead"}, {"kind": "x"}, {"fault_class": "sunburn"}], ids=str
)
def test_a_word_that_the_domain_does_not_know_is_refused(word: dict[str, str]) -> None:
    model = FindingModel.of(FINDING).model_copy(update=word)
    with pytest.raises(ValueError, match=next(iter(word.values()))):
        model.to_finding("c")


def test_a_node_goes_through_an_event_and_comes_back_as_it_was() -> None:
    assert NodeRefModel.of(REF).to_ref() == REF
    assert NodeRefModel(cluster="c", name="n").to_ref() == NodeRef("c", "n")


def fault_detected(**changes: Any) -> dict[str, Any]:
    event = GpuFaultDetected(
        event_id="e", occurred_at=NOW, cluster="c", family="ecc", findings=FOUND
    )
    return {**event.model_dump(mode="json"), **changes}


def test_the_fault_queue_delivers_the_event_in_its_envelope() -> None:
    envelope = {"version": "0", "id": "x", "source": "nodemend", "detail": fault_detected()}
    read = FaultEnvelope.model_validate_json(json.dumps(envelope))
    assert read.detail.findings[0].to_finding("c") == FINDING


@pytest.mark.parametrize("changes", [{"findings": []}, {"schema_version": 2}, {"event_id": None}])
def test_an_event_of_another_shape_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GpuFaultDetected.model_validate(fault_detected(**changes))


def test_what_a_later_release_adds_to_an_event_is_ignored_and_the_rest_is_read() -> None:
    newer = fault_detected(more=1)
    newer["findings"][0]["more"] = {"deep": 1}

    assert GpuFaultDetected.model_validate(newer) == GpuFaultDetected.model_validate(
        fault_detected()
    )


@pytest.mark.parametrize("detail_type", DATA)
def test_a_step_may_record_only_what_the_event_has_a_field_for(detail_type: DetailType) -> None:
    with pytest.raises(InvalidInputError, match=f"events.{detail_type}.outcom: is no field"):
        detail_of(detail_type, {**DATA[detail_type], "outcom": "REPLACED"})


def test_a_blind_scan_names_at_least_one_rule() -> None:
    problem = RuleProblem(rule_id="r", reason=ReasonModel.of(WHY))
    blind = ScanBlind(event_id="e", occurred_at=NOW, cluster="c", family="ecc", rules=(problem,))
    assert ScanBlind.model_validate_json(blind.model_dump_json()) == blind
    with pytest.raises(ValidationError):
        ScanBlind(event_id="e", occurred_at=NOW, cluster="c", family="ecc", rules=())


@pytest.mark.parametrize("model", EVENT_MODELS.values(), ids=lambda model: model.__name__)
def test_every_event_has_a_schema_that_says_its_version(model: type[EventDetail]) -> None:
    schema = model.model_json_schema()
    assert schema["properties"]["schema_version"]["const"] == 1
    assert {"event_id", "occurred_at", "cluster"} <= set(schema["required"])
    assert schema.get("additionalProperties", True) is True  # more fields come with later releases
    assert schema["description"]


def test_an_event_with_more_findings_than_eventbridge_takes_is_cut_and_stays_valid() -> None:
    many = tuple(
        FindingModel.of(replace(FINDING, gpu_uuid=f"GPU-{number}")) for number in range(2000)
    )
    text = encode_detail(fault_detected(findings=[one.model_dump(mode="json") for one in many]))

    assert len(text.encode()) <= MAX_EVENT_BYTES
    kept = GpuFaultDetected.model_validate_json(text).findings
    assert 0 < len(kept) < 2000
