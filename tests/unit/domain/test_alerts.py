"""What an alert may mean: rules, clusters, copies, the past."""

from datetime import UTC, datetime, timedelta

import pytest

from nodemend.catalogue import load_catalogue
from nodemend.domain.alerts import (
    MAX_ALERT_AGE,
    Alert,
    AlertStatus,
    clusters_of,
    digest,
    families_of,
    fault_class_of,
    record_id,
    why_stale,
)
from nodemend.domain.faults import Family, FaultClass
from nodemend.domain.policy import ClusterPolicy

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
RULES = load_catalogue().rules
A = ClusterPolicy("train-a", "ws-1", "eu-central-1", 'cluster="a", env="prod"')
B = ClusterPolicy("train-b", "ws-1", "eu-central-1", 'cluster="b"')
C = ClusterPolicy("train-c", "ws-2", "eu-central-1")


def firing(**changes):
    values = {
        "status": AlertStatus.FIRING,
        "labels": {"alertname": "GpuXidCritical", "Hostname": "n1"},
        "starts_at": NOW,
        "fingerprint": "f1",
    }
    return Alert(**(values | changes))


@pytest.mark.parametrize(
    ("name", "families"),
    [
        ("GpuXidCritical", {Family.ECC}),
        ("DCGM_ECC_DBE", {Family.ECC}),
        ("GPU has fallen off", {Family.ECC}),
        ("GpuTooHotTemperature", {Family.THERMAL}),
        ("gpu-idle", {Family.UTILIZATION}),
        ("XidOrThermal", {Family.ECC, Family.THERMAL}),
        ("GpuBroken", set(Family)),
        ("", set(Family)),
    ],
)
def test_the_alerts_name_tells_the_families_or_all_are_asked(name, families):
    assert families_of({"alertname": name}, RULES) == families


def test_a_rule_or_family_label_decides_before_the_name():
    labels = {"alertname": "GpuXid"}
    assert families_of({**labels, "nodemend_rule": "gpu-temperature"}, RULES) == {Family.THERMAL}
    assert families_of({**labels, "nodemend_family": "utilization"}, RULES) == {Family.UTILIZATION}
    assert families_of({**labels, "nodemend_family": "no-such"}, RULES) == {Family.ECC}
    assert fault_class_of({"nodemend_rule": "gpu-lost"}, RULES) is FaultClass.GPU_LOST
    assert fault_class_of(labels, RULES) is None


@pytest.mark.parametrize(
    ("labels", "clusters"),
    [
        ({"cluster": "train-b"}, (B,)),
        ({"eks_cluster": "train-a", "cluster": "b"}, (A,)),
        ({"cluster": "a"}, (A, C)),
        ({"cluster": "a", "env": "test"}, (C,)),
        ({}, (A, B, C)),
    ],
)
def test_a_clusters_name_decides_else_its_matcher_may_only_exclude(labels, clusters):
    assert clusters_of(labels, (A, B, C)) == clusters


def test_labels_that_contradict_every_matcher_mean_no_cluster():
    assert clusters_of({"cluster": "z"}, (A, B)) == ()


def test_a_matcher_by_pattern_or_inequality_excludes_nothing():
    for matcher in ('cluster=~"a|b"', 'cluster!="z"'):
        one = ClusterPolicy("x", "ws-1", "eu-central-1", matcher)
        assert clusters_of({"cluster": "z"}, (one,)) == (one,)


@pytest.mark.case("D43")
def test_d43_fingerprint_start_and_status_make_the_key():
    assert firing().key == firing(labels={"alertname": "other"}).key
    keys = {
        firing().key,
        firing(fingerprint="f2").key,
        firing(starts_at=NOW + timedelta(microseconds=1)).key,
        firing(status=AlertStatus.RESOLVED).key,
        firing(starts_at=None).key,
    }
    assert len(keys) == 5
    assert firing(status=AlertStatus.RESOLVED).key_when(AlertStatus.FIRING) == firing().key


def test_without_a_fingerprint_the_labels_stand_for_it():
    one = firing(fingerprint="", labels={"a": "1", "b": "2"})
    assert one.key == firing(fingerprint="", labels={"b": "2", "a": "1"}).key
    assert one.key != firing(fingerprint="", labels={"a": "1", "b": "3"}).key


@pytest.mark.case("D26")
def test_d26_what_began_before_the_last_close_is_the_past():
    late, new = firing(), firing(starts_at=NOW + timedelta(seconds=1))
    why = why_stale(late, last_close=NOW, now=NOW + timedelta(minutes=1))
    assert why is not None
    assert why.code == "before_last_close"
    assert why_stale(new, last_close=NOW, now=NOW + timedelta(minutes=1)) is None
    assert why_stale(firing(starts_at=None), last_close=NOW, now=NOW) is None


def test_an_alert_of_last_week_is_too_old():
    old = firing(starts_at=NOW - MAX_ALERT_AGE - timedelta(seconds=1))
    why = why_stale(old, last_close=None, now=NOW)
    assert why is not None
    assert why.code == "too_old"
    assert why_stale(firing(starts_at=NOW - MAX_ALERT_AGE), last_close=None, now=NOW) is None


def test_a_records_id_has_the_form_of_a_ulid_and_is_always_the_same():
    one = record_id(NOW, "a", "b")
    assert one == record_id(NOW, "a", "b")
    assert one != record_id(NOW, "ab", "")
    assert len(one) == 26
    assert set(one) <= set("0123456789ABCDEFGHJKMNPQRSTVWXYZ")
    assert one[:10] < record_id(NOW + timedelta(seconds=1), "a", "b")[:10]


def test_a_digest_tells_where_one_part_ends():
    assert digest("a", "bc") != digest("ab", "c")
    assert digest("\ud800")  # half a surrogate, as broken JSON can hold it
