"""What AMP's alert manager sends to SNS: by docs/alertmanager.example.yaml, or by default."""

import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

from local.aws.stack import LocalStack
from local.scenario import Alert

CALLER = "alertmanager"


def labels_of(alert: Alert, node: str, cluster: str) -> dict[str, str]:
    """Return the labels that the alert's rule would leave."""
    labels = {"alertname": alert.alertname, "cluster": cluster, "Hostname": node}
    if alert.gpu is not None:
        labels["gpu"] = str(alert.gpu)
    return labels | alert.labels


def json_message(alert: Alert, labels: dict[str, str], now: datetime) -> str:
    """Return the message that the shipped template renders."""
    starts_at = now - timedelta(seconds=alert.age_s)
    names = json.dumps(sorted(labels.items())).encode()
    one: dict[str, Any] = {
        "status": alert.status,
        "startsAt": starts_at.isoformat(),
        "fingerprint": hashlib.sha256(names).hexdigest()[:16],
        "labels": labels,
        "annotations": alert.annotations,
    }
    group = {"version": "4", "receiver": "nodemend", "status": alert.status, "alerts": [one]}
    return json.dumps(group)


def text_message(alerts: list[tuple[str, dict[str, str], dict[str, str]]]) -> str:
    """Return the default text of (status, labels, annotations) of each alert."""
    common = set(alerts[0][2].items()).intersection(*(a.items() for _, _, a in alerts))
    text = " ".join(value for _, value in sorted(common)) + "\n"
    for title, status in (("Firing", "firing"), ("Resolved", "resolved")):
        chosen = [alert for alert in alerts if alert[0] == status]
        text += "\n"
        if chosen:
            text += f"Alerts {title}:\n" + "".join(map(_block, chosen)) + "\n"
        text += "\n"
    return text


def _block(alert: tuple[str, dict[str, str], dict[str, str]]) -> str:
    _, labels, annotations = alert
    first = sorted(labels.items(), key=lambda pair: (pair[0] != "alertname", pair[0]))
    lines = ["Labels:", *(f" - {name} = {value}" for name, value in first), "Annotations:"]
    lines += [f" - {name} = {value}" for name, value in sorted(annotations.items())]
    return "\n".join([*lines, "Source: /graph?g0.expr=x"]) + "\n"


def publish(stack: LocalStack, alert: Alert, node: str, *, cluster: str) -> None:
    """Publish the alert to the stack's alert topic, as AMP's alert manager does."""
    labels = labels_of(alert, node, cluster)
    if alert.format == "json":
        message, subject = json_message(alert, labels, datetime.now(UTC)), "nodemend alert"
    else:
        message = text_message([(alert.status, labels, alert.annotations)])
        count = ":1" if alert.status == "firing" else ""
        subject = f"[{alert.status.upper()}{count}] {alert.alertname}"
    stack.client("sns", caller=CALLER).publish(
        TopicArn=stack.resource_id("AlertTopic"),
        Subject=subject[:100],
        Message=message,
        MessageAttributes={
            name: {"DataType": "String", "StringValue": labels[name]}
            for name in ("cluster", "alertname")
        },
    )
