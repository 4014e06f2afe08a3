"""What is generated is not stale, and what is published is valid."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from nodemend.catalogue import load_catalogue
from nodemend.contracts.alerts import ReceiveAlertRequest, parse_notification
from nodemend.contracts.approving import AnswerApprovalRequest
from nodemend.contracts.dispatch import DispatchEvent
from nodemend.contracts.events import EVENT_MODELS, FaultEnvelope
from nodemend.contracts.pausing import SetPauseRequest
from nodemend.contracts.scan import ScanGpuHealthRequest
from nodemend.contracts.steps import AdmitRemediationRequest, RemediateByHand
from nodemend.contracts.validation import ValidatePolicyRequest
from nodemend.contracts.watch import WatchEvent
from nodemend.domain.events import DetailType
from tests.unit.structure.repository import FUNCTIONS, ROOT
from tools import rules_doc, schemas

SAMPLES = sorted((ROOT / "events").glob("*.json"))
SCHEMAS = [ROOT / name for name in schemas.documents()]
MODELS: dict[str, Any] = {
    "admit_remediation": AdmitRemediationRequest,
    "answer_approval": AnswerApprovalRequest,
    "dispatch_hint_sqs": DispatchEvent,
    "execution_ended": WatchEvent,
    "remediate_by_hand": RemediateByHand,
    "scan_ecc": ScanGpuHealthRequest,
    "scan_thermal": ScanGpuHealthRequest,
    "scan_utilization": ScanGpuHealthRequest,
    "set_pause": SetPauseRequest,
    "validate_policy": ValidatePolicyRequest,
}
"""Model of each sample that is not named after a step."""


def model_of(sample: Path) -> Any:
    if sample.stem in MODELS:
        return MODELS[sample.stem]
    from nodemend.contracts import steps  # noqa: PLC0415

    name = "".join(word.capitalize() for word in sample.stem.split("_"))
    return getattr(steps, f"{name}Request")


def test_no_schema_is_stale():
    assert schemas.stale_files(ROOT) == []


def test_stale_missing_and_superfluous_schemas_are_found(tmp_path):
    schemas.write(tmp_path)
    (tmp_path / "events/schemas/policy.json").write_text("{}")
    (tmp_path / "events/schemas/scan-blind.json").unlink()
    (tmp_path / "local/schemas/old.json").write_text("{}")

    assert schemas.stale_files(tmp_path) == [
        "events/schemas/scan-blind.json: stale or missing",
        "events/schemas/policy.json: stale or missing",
        "local/schemas/old.json: has no model",
    ]
    schemas.write(tmp_path)
    assert schemas.stale_files(tmp_path) == []


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_schema_is_valid_and_says_what_it_is(path):
    schema = json.loads(path.read_text())

    Draft202012Validator.check_schema(schema)
    assert schema["$id"].startswith("urn:nodemend:")
    assert schema["$id"].endswith(f":{schema['version']}")
    assert schema["title"]
    assert schema["description"]


def test_every_detail_type_has_a_model_and_a_schema():
    assert set(EVENT_MODELS) == set(DetailType)
    for kind in DetailType:
        schema = json.loads((ROOT / f"events/schemas/{schemas.kebab(kind)}.json").read_text())

        assert schema["x-amazon-events-detail-type"] == kind


def test_consumers_survive_a_new_field_and_authors_learn_of_a_wrong_one():
    event = json.loads((ROOT / "events/schemas/scan-blind.json").read_text())
    policy = json.loads((ROOT / "events/schemas/policy.json").read_text())

    assert "additionalProperties" not in event
    assert policy["additionalProperties"] is False


def test_rules_page_is_not_stale():
    assert rules_doc.PATH.read_text() == rules_doc.document(load_catalogue())


def test_stale_rules_page_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rules_doc, "PATH", tmp_path / "RULES.md")

    assert rules_doc.main(["--check"]) == 1
    assert rules_doc.main([]) == 0
    assert rules_doc.main(["--check"]) == 0
    (tmp_path / "RULES.md").write_text("old")
    assert rules_doc.main(["--check"]) == 1
    assert "run make schemas" in capsys.readouterr().err


@pytest.mark.parametrize("rule", load_catalogue().rules, ids=lambda rule: rule.id)
def test_rules_page_has_all_that_a_reader_needs_of_a_rule(rule):
    section = rules_doc.document(load_catalogue()).split(f"### {rule.id}\n")[1].split("\n### ")[0]

    assert rule.why in section
    assert rule.source in section
    assert all(f"`{name}`" in section for name in rule.thresholds)
    assert "```promql" in section


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_sample_event_is_what_its_function_takes(sample):
    event = json.loads(sample.read_text())

    if sample.stem == "gpu_fault_detected_sqs":
        for record in event["Records"]:
            body = json.loads(record["body"])
            FaultEnvelope.model_validate(body)
            schema = json.loads((ROOT / "events/schemas/gpu-fault-detected.json").read_text())
            Draft202012Validator(schema).validate(body["detail"])
    elif sample.stem == "alert_sqs":
        for record in event["Records"]:
            assert parse_notification(ReceiveAlertRequest.model_validate(record)).alerts
    else:
        model_of(sample).model_validate(event)


def test_every_step_has_a_sample_event():
    ways_in = {
        "scan_gpu_health",
        "receive_alert",
        "open_incident",
        "dispatch_incidents",
        "watch_incidents",
    }

    assert set(FUNCTIONS) - ways_in <= {path.stem for path in SAMPLES}


def test_sample_by_hand_fits_its_published_schema():
    schema = json.loads((ROOT / "events/schemas/remediate_by_hand.json").read_text())
    sample = json.loads((ROOT / "events/remediate_by_hand.json").read_text())

    Draft202012Validator(schema).validate(sample)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "local/scenarios").glob("*.yaml")), ids=lambda path: path.stem
)
def test_scenario_fits_its_published_schema(path):
    schema = json.loads((ROOT / "local/schemas/scenario.json").read_text())

    Draft202012Validator(schema).validate(yaml.safe_load(path.read_text()))
