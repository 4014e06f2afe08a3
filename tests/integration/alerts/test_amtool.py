"""What a real alert manager renders, and what nodemend reads of it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from local.alerts import text_message
from nodemend.contracts.alerts import ReceiveAlertRequest, parse_notification

ROOT = Path(__file__).resolve().parents[3]
DEFINITION = yaml.safe_load((ROOT / "docs" / "alertmanager.example.yaml").read_text())
DEFAULTS = [
    Path("/usr/share/prometheus/alertmanager/default.tmpl"),
    Path("/usr/share/alertmanager/default.tmpl"),
]

pytestmark = pytest.mark.skipif(
    shutil.which("amtool") is None,
    reason="amtool is not installed (Debian: prometheus-alertmanager)",
)

NASTY = 'XID 79 on "gpu 3"\n - Hostname = other\nback\\slash \x01\x07 \U0001f600 \u00ad'
FIRING = {
    "status": "firing",
    "labels": {"alertname": "GpuXid", "Hostname": "n1", "gpu": "3", "err_msg": NASTY},
    "annotations": {"summary": NASTY, "runbook": "see \\\\server\\share"},
    "startsAt": "2026-11-30T17:32:05.123456789Z",
    "endsAt": "0001-01-01T00:00:00Z",
    "generatorURL": "/graph?g0.expr=x",
    "fingerprint": "f1",
}
RESOLVED = {
    **FIRING,
    "status": "resolved",
    "labels": {"alertname": "GpuXid", "Hostname": "n2"},
    "annotations": {},
    "endsAt": "2026-11-30T18:32:05Z",
    "fingerprint": "f2",
}


def render(tmp_path, text, template, alerts):
    data = tmp_path / "data.json"
    common = dict(set.intersection(*(set(one["annotations"].items()) for one in alerts)))
    group = {"receiver": "nodemend", "status": "firing", "alerts": alerts, "groupLabels": {},
             "commonLabels": {"alertname": "GpuXid"}, "commonAnnotations": common,
             "externalURL": "/"}  # fmt: skip
    data.write_text(json.dumps(group))
    done = subprocess.run(
        ["amtool", "template", "render", f"--template.glob={template}", f"--template.text={text}",
         f"--template.data={data}"],
        capture_output=True, text=True, timeout=30, check=True)  # fmt: skip
    return done.stdout


def parse(body):
    return parse_notification(ReceiveAlertRequest(body=body))


@pytest.mark.case("D38")
def test_d38_the_shipped_template_renders_json_that_is_read_exactly(tmp_path):
    template = tmp_path / "nodemend.tmpl"
    template.write_text(DEFINITION["template_files"]["nodemend"])
    message = yaml.safe_load(DEFINITION["alertmanager_config"])["receivers"][1]["sns_configs"][0]
    body = render(tmp_path, message["message"], template, [FIRING, RESOLVED])
    notification = parse(body)
    assert notification.incomplete is None
    assert [dict(one.labels) for one in notification.alerts] == [
        FIRING["labels"],
        RESOLVED["labels"],
    ]
    assert notification.alerts == parse(json.dumps({"alerts": [FIRING, RESOLVED]})).alerts


@pytest.mark.case("D37")
def test_d37_the_shipped_definition_is_valid(tmp_path):
    (tmp_path / "nodemend.tmpl").write_text(DEFINITION["template_files"]["nodemend"])
    config = yaml.safe_load(DEFINITION["alertmanager_config"])
    path = tmp_path / "alertmanager.yml"
    path.write_text(yaml.safe_dump({**config, "templates": ["nodemend.tmpl"]}))
    done = subprocess.run(
        ["amtool", "check-config", path], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.case("D35")
def test_d35_the_default_text_is_read_and_local_writes_the_same(tmp_path):
    default = next((path for path in DEFAULTS if path.is_file()), None)
    if default is None:
        pytest.skip("the alert manager's default templates are not installed")
    several = {**FIRING, "labels": {"alertname": "GpuXid", "Hostname": "n1", "gpu": "3"}}
    for alerts in ([several], [several, RESOLVED], [several, {**several, "annotations": {}}]):
        text = render(tmp_path, '{{ template "sns.default.message" . }}', default, alerts)
        subject = render(tmp_path, '{{ template "sns.default.subject" . }}', default, alerts)
        written = text_message([(a["status"], a["labels"], a["annotations"]) for a in alerts])
        assert written.split() == text.split()
        envelope = {"Type": "Notification", "TopicArn": "t", "Message": text, "Subject": subject}
        read = parse(json.dumps(envelope))
        assert [dict(one.labels) for one in read.alerts] == [one["labels"] for one in alerts]
