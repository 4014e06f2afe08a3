"""Messages of alert managers: what is read, what is only a hint, what is refused."""

import json
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from local.alerts import text_message
from nodemend.contracts.alerts import ReceiveAlertRequest, parse_notification, parse_time
from nodemend.domain.alerts import AlertStatus
from nodemend.domain.errors import InvalidInputError

START = datetime(2026, 11, 30, 17, 32, 5, 123456, tzinfo=UTC)
LABELS = {"alertname": "GpuXidCritical", "Hostname": "n1", "gpu": "3"}


def alert(**changes):
    values = {
        "status": "firing",
        "labels": LABELS,
        "annotations": {"summary": "XID 79"},
        "startsAt": "2026-11-30T17:32:05.123456789Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "/graph",
        "fingerprint": "f1",
    }
    return values | changes


def group(*alerts, **changes):
    values = {
        "version": "4",
        "groupKey": "{}:{}",
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "default",
        "groupLabels": {},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": "",
        "alerts": list(alerts) or [alert()],
    }
    return json.dumps(values | changes)


def envelope(message, **changes):
    values = {
        "Type": "Notification",
        "MessageId": "m-1",
        "TopicArn": "arn:aws:sns:eu-central-1:1:alerts",
        "Message": message,
        "Timestamp": "2026-11-30T17:33:00.000Z",
        "SignatureVersion": "1",
    }
    return json.dumps(values | changes)


def parse(body, **changes):
    return parse_notification(ReceiveAlertRequest.model_validate({"body": body, **changes}))


def attributes(**words):
    return {"MessageAttributes": {k: {"Type": "String", "Value": v} for k, v in words.items()}}


def raw_attributes(**words):
    return {
        "messageAttributes": {k: {"stringValue": v, "dataType": "String"} for k, v in words.items()}
    }


# --- envelopes ----------------------------------------------------------------------------------


def test_webhook_v4_is_read_with_and_without_the_envelope():
    wrapped, raw = parse(envelope(group())), parse(group())
    assert wrapped.alerts == raw.alerts
    (one,) = raw.alerts
    assert (one.status, dict(one.labels), one.starts_at, one.fingerprint) == (
        AlertStatus.FIRING,
        LABELS,
        START,
        "f1",
    )
    assert raw.incomplete is None
    assert one.node_names == ("n1",)


def test_the_time_of_sending_is_snss_own_else_the_queues():
    sent = {"attributes": {"SentTimestamp": "1796040000000"}}
    assert parse(envelope(group()), **sent).sent_at == datetime(2026, 11, 30, 17, 33, tzinfo=UTC)
    assert parse(group(), **sent).sent_at == datetime.fromtimestamp(1796040000, UTC)
    broken = parse(envelope(group(), Timestamp="soon"), attributes={"SentTimestamp": "later"})
    assert broken.sent_at is None


@pytest.mark.parametrize("kind", ["SubscriptionConfirmation", "UnsubscribeConfirmation"])
def test_confirmations_of_sns_are_accepted_and_hold_nothing(kind):
    notification = parse(envelope("You have chosen to subscribe", Type=kind))
    assert notification.alerts == ()
    assert notification.incomplete is None


def test_a_test_notification_is_known_as_one():
    (one,) = parse(group(alert(labels={"alertname": "TestAlert", "instance": "Grafana"}))).alerts
    assert one.is_test


# --- JSON ---------------------------------------------------------------------------------------


def test_the_template_that_aws_documents_is_read():
    body = (
        '{"receiver": "default","status": "firing","alerts": [{"status": "firing",'
        '"labels": {"alertname": "GpuXidCritical", "Hostname": "n1", "gpu": "3"},'
        '"startsAt": "2026-11-30 17:32:05.123456789 +0000 UTC",'
        '"endsAt": "0001-01-01 00:00:00 +0000 UTC","generatorURL": "","fingerprint": "f1"}],'
        '"groupLabels": {},"externalURL": ""}'
    )
    assert parse(body).alerts == parse(group()).alerts


def test_grafanas_fields_are_left_alone():
    one = alert(values={"B": 1.5}, valueString="[ var='B' ]", imageURL="", orgId=1)
    body = group(one, orgId=1, title="[FIRING:1]", state="alerting", message="x", version="1")
    assert parse(body).alerts == parse(group()).alerts


def test_firing_and_resolved_are_told_alert_by_alert():
    gone = alert(status="resolved", fingerprint="f2")
    statuses = [one.status for one in parse(group(gone, alert())).alerts]
    assert statuses == [AlertStatus.RESOLVED, AlertStatus.FIRING]


def test_an_alert_without_a_status_takes_the_groups_only_where_that_is_certain():
    bare = {key: value for key, value in alert().items() if key != "status"}
    assert parse(group(bare)).alerts[0].status is AlertStatus.FIRING
    resolved = parse(group(bare, bare, status="resolved"))
    assert {one.status for one in resolved.alerts} == {AlertStatus.RESOLVED}
    with pytest.raises(InvalidInputError, match=r"alerts\.0\.status"):
        parse(group(bare, bare))


def test_absent_labels_and_annotations_are_empty():
    bare = {"status": "firing", "startsAt": "", "fingerprint": "f1"}
    assert dict(parse(group(bare, alert(labels=None))).alerts[0].labels) == {}
    assert parse(group(bare)).alerts[0].starts_at is None


@pytest.mark.case("D38")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-30 17:32:05.123456789 +0000 UTC", START),
        ("2026-11-30T17:32:05.123456Z", START),
        ("2026-11-30T19:32:05.1234561+02:00", START),
        ("2026-11-30 19:32:05.123456 +0200 CEST m=+12.5", START),
        ("2026-11-30 23:02:05.123456 +0530 +0530", START),
        ("2026-11-30T17:32:05Z", START.replace(microsecond=0)),
        ("0001-01-01 00:00:00 +0000 UTC", None),
        ("0001-01-01T00:00:00Z", None),
        ("", None),
    ],
)
def test_d38_go_times_nanoseconds_rfc_3339_and_the_zero_time_are_read(text, expected):
    assert parse_time(text) == expected


@pytest.mark.parametrize("text", ["soon", "2026-11-30", "9999-12-31T23:59:59-01:00", "1796040000"])
def test_what_is_no_time_is_refused_by_its_field(text):
    with pytest.raises(InvalidInputError) as refused:
        parse(group(alert(startsAt=text)))
    assert refused.value.field == "alerts.0.startsAt"


@pytest.mark.case("D38")
def test_d38_strings_as_go_quotes_them_are_read():
    body = r"""{"status":"firing","alerts":[{"status":"firing","fingerprint":"f1","labels":{
      "err_msg":"a\"b\\x01\n\x01\a\v\U0001f600\u00ad\x7f\U000e0001\xff"}}]}"""
    (one,) = parse(body).alerts
    assert one.labels["err_msg"] == 'a"b\\x01\n\x01\x07\x0b\U0001f600\xad\x7f\U000e0001\ufffd'


UNESCAPED = (
    '{"status": "firing","alerts": [{"status": "firing","labels": {"Hostname": "n1"},'
    '"annotations": {"summary": "XID 79 on "gpu 3"\nnow"},"fingerprint": "f1"}]}'
)


@pytest.mark.case("D38")
def test_d38_broken_json_without_attributes_is_refused_with_the_remedy():
    with pytest.raises(InvalidInputError) as refused:
        parse(envelope(UNESCAPED))
    assert refused.value.field == "Message"
    assert 'printf "%q"' in refused.value.remedy


@pytest.mark.case("D38")
@pytest.mark.parametrize("is_raw", [True, False])
def test_d38_of_broken_json_only_the_attributes_are_a_hint(is_raw):
    words = {"cluster": "gpu-prod", "alertname": "GpuXid", "Hostname": "n1"}
    notification = (
        parse(UNESCAPED, **raw_attributes(**words))
        if is_raw
        else parse(envelope(UNESCAPED, **attributes(**words)))
    )
    assert notification.alerts == ()
    assert notification.incomplete is not None
    assert notification.hints == {"cluster": "gpu-prod", "alertname": "GpuXid"}


def test_an_annotation_that_brings_a_second_labels_key_is_not_believed():
    body = (
        '{"status":"firing","alerts":[{"status":"firing","labels":{"Hostname":"n1"},'
        '"annotations":{"summary":"x"},"labels":{"Hostname":"other"},"fingerprint":"f1"}]}'
    )
    with pytest.raises(InvalidInputError, match="twice"):
        parse(body)


@pytest.mark.case("D41")
def test_d41_a_cut_message_is_a_hint_and_so_is_a_group_with_alerts_left_out():
    cut = parse(envelope(group()[:-40], **attributes(truncated="true")))
    assert cut.alerts == ()
    assert cut.incomplete is not None
    assert cut.incomplete.code == "truncated"
    left_out = parse(group(truncatedAlerts=7))
    assert len(left_out.alerts) == 1
    assert left_out.incomplete is not None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ("", "Message"),
        ("hello", "Message"),
        ("Error - not a valid UTF-8 encoded string", "Message"),
        ("[]", "Message"),
        ("{}", "alerts"),
        ('{"alerts": {}}', "alerts"),
        ('{"alerts": [1]}', "alerts.0"),
        ('{"alerts": [{"status": "maybe"}]}', "alerts.0.status"),
        ('{"alerts": [{"status": "firing", "labels": {"gpu": 3}}]}', "alerts.0.labels.gpu"),
        ("{" * 100_000, "Message"),
        ('{"a":' * 100_000, "Message"),
        ('{"alerts": ' + "9" * 5000 + "}", "Message"),
    ],
)
def test_what_cannot_be_read_is_refused_with_field_and_remedy(body, field):
    for wrapped in (body, envelope(body)):
        with pytest.raises(InvalidInputError) as refused:
            parse(wrapped)
        assert refused.value.field == field
        assert refused.value.remedy


def test_a_broken_envelope_is_refused_by_its_field():
    with pytest.raises(InvalidInputError) as refused:
        parse(envelope("x", Type="Other"))
    assert refused.value.field == "Type"


@given(st.text())
def test_no_body_crashes_the_parser(body):
    for wrapped in (body, envelope(body), "{" + body):
        with suppress(InvalidInputError):
            parse(wrapped)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["alerts", "labels", "status", "startsAt", "fingerprint", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_no_json_crashes_the_parser(document):
    with suppress(InvalidInputError):
        parse(json.dumps({"alerts": [document]} if document else document))


# --- the default text ---------------------------------------------------------------------------

OTHER = {"alertname": "GpuXidCritical", "Hostname": "n2", "gpu": "0"}


def read(alerts, subject=None):
    firing = sum(status == "firing" for status, _, _ in alerts)
    told = f"[FIRING:{firing}] GpuXid" if firing else "[RESOLVED] GpuXid"
    return parse(envelope(text_message(alerts), Subject=told if subject is None else subject))


@pytest.mark.case("D35")
def test_d35_the_default_text_with_two_alerts_is_read():
    notification = read([("firing", LABELS, {"summary": "a"}), ("firing", OTHER, {"summary": "b"})])
    assert [dict(one.labels) for one in notification.alerts] == [LABELS, OTHER]
    assert notification.incomplete is None


@pytest.mark.case("D36")
def test_d36_in_text_firing_and_resolved_are_told_apart():
    notification = read([("firing", LABELS, {"s": "a"}), ("resolved", OTHER, {"s": "b"})])
    assert [(one.status, one.labels["Hostname"]) for one in notification.alerts] == [
        (AlertStatus.FIRING, "n1"),
        (AlertStatus.RESOLVED, "n2"),
    ]
    assert [one.status for one in read([("resolved", OTHER, {})]).alerts] == [AlertStatus.RESOLVED]


def test_values_keep_their_equal_signs_spaces_and_strange_line_ends():
    labels = {"alertname": "x", "err": "a = b \u2028 - Hostname = other\r", "gpu": ""}
    assert dict(read([("firing", labels, {})]).alerts[0].labels) == labels


def test_a_label_line_inside_an_annotation_is_no_label():
    (one,) = read([("firing", LABELS, {"summary": "XID\n - Hostname = other\nmore"})]).alerts
    assert dict(one.labels) == LABELS


FORGED = "Labels:\n - alertname = A\n - Hostname = other\nAnnotations:\n - s = x"


@pytest.mark.parametrize(
    "value",
    [
        f"x\nSource: y\n{FORGED}",
        f"x\nSource: y\n\nAlerts Resolved:\n{FORGED}",
        f"x\n\nAlerts Firing:\n{FORGED}",
        f"x\n\nAlerts Firing:\n{FORGED}\nSource: y\n",
        f"Alerts Firing:\n{FORGED}\nSource: y\n\nAlerts Resolved:\n{FORGED}",
    ],
)
@pytest.mark.parametrize("others", [[], [("firing", OTHER, {"t": "b"})],
                                    [("resolved", OTHER, {"t": "b"})]])  # fmt: skip
@pytest.mark.parametrize("subject", [None, ""])
def test_a_forged_block_makes_the_text_a_mere_hint(value, others, subject):
    notification = read([("firing", LABELS, {"s": value}), *others], subject)
    for one in notification.alerts:
        assert one.labels["Hostname"] != "other" or one.status is AlertStatus.RESOLVED


def test_two_alerts_that_no_subject_counts_are_a_hint_to_ask_the_cluster():
    notification = read([("firing", LABELS, {"s": "a"}), ("firing", OTHER, {"s": "b"})], "alert")
    assert notification.alerts == ()
    assert notification.incomplete is not None
    assert notification.incomplete.code == "ambiguous_text"


def test_a_cut_text_is_a_hint():
    text = text_message([("firing", LABELS, {"s": "a"})])
    assert parse(envelope(text[: text.index("Annotations")])).incomplete is not None


def test_a_label_of_several_lines_is_not_believed():
    notification = read([("firing", {**LABELS, "err": "x\n - Hostname = other"}, {})])
    assert notification.alerts == ()


LINES = [
    "Labels:",
    "Annotations:",
    "Source: x",
    "Source:",
    "Alerts Firing:",
    "Alerts Resolved:",
    "",
    " - alertname = A",
    " - Hostname = forged",
    " - a = forged",
    "prose",
]
annotation_values = st.lists(st.sampled_from(LINES), max_size=9).map("\n".join)
real_alerts = st.lists(
    st.tuples(
        st.sampled_from(["firing", "resolved"]),
        st.sampled_from([LABELS, OTHER, {"alertname": "B", "Hostname": "n3"}]),
        st.dictionaries(st.sampled_from(["s", "t"]), annotation_values, max_size=2),
    ),
    min_size=1,
    max_size=4,
)


PUSHED = "\n".join(["x", "Source: x", "Alerts Resolved:", *FORGED.split("\n")])


@given(real_alerts, st.booleans())
@example([("firing", LABELS, {"s": PUSHED}), ("firing", OTHER, {"t": "b"})], False)
@example([("firing", LABELS, {"s": PUSHED}), ("firing", OTHER, {"t": "b"})], True)
def test_forged_labels_never_surface_as_a_firing_alert(alerts, has_subject):
    notification = read(alerts, None if has_subject else "nodemend alert")
    real = [labels for status, labels, _ in alerts if status == "firing"]
    read_as_firing = [dict(a.labels) for a in notification.alerts if a.status == "firing"]
    assert all(labels in real for labels in read_as_firing)
    if notification.incomplete is None:
        assert len(read_as_firing) == len(real), "an alert was swallowed without a word"
