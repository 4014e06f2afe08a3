"""The AMP adapter before a real Prometheus with a simulated fleet."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime

import botocore.credentials
import pytest

from local.amp.exporter import GpuFleet
from local.amp.stack import LocalAmp
from local.calls import ApiFault, CallLog, FaultPlan
from local.identity import Identities
from nodemend.adapters.amp import AmpMetrics
from nodemend.domain.policy import ClusterPolicy

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs the prometheus binary (see CONTRIBUTING.md)"
)

CLUSTER = ClusterPolicy("prod", "ws-1", "us-east-1")
NODES = ("ip-10-0-1-5.ec2.internal", "ip-10-0-1-6.ec2.internal")


@pytest.fixture(scope="module")
def faults() -> FaultPlan:
    return FaultPlan()


@pytest.fixture(scope="module")
def calls() -> CallLog:
    return CallLog()


@pytest.fixture(scope="module")
def metrics(faults: FaultPlan, calls: CallLog) -> Iterator[AmpMetrics]:
    identities = Identities()
    key = identities.issue("scan_gpu_health")
    fleet = GpuFleet("prod")
    for name in NODES:
        fleet.add_node(name, "p5.48xlarge")
    with LocalAmp(
        {"ws-1": [fleet]}, identities=identities, faults=faults, calls=calls, history_s=120
    ) as amp:
        amp.wait_until_scraped()
        yield AmpMetrics(
            credentials=botocore.credentials.Credentials(
                key.access_key_id, key.secret_access_key, key.session_token
            ),
            endpoint_url=amp.url,
        )


def test_sixteen_gpus_are_seen_and_billed_samples_are_told(metrics, calls):
    now = datetime.now(UTC)
    queries = {
        "temp": "max by (UUID) (DCGM_FI_DEV_GPU_TEMP)",
        "hot": "DCGM_FI_DEV_GPU_TEMP > 1000",
        "nodes": 'count(count by (Hostname) (DCGM_FI_DEV_GPU_TEMP{Hostname=~"ip-.+"})) + 0',
    }
    results = metrics.query_many(CLUSTER, queries, now)
    assert [result.problem for result in results.values()] == [None] * 3
    assert len(results["temp"].samples) == 16
    assert results["hot"].samples == ()
    assert results["nodes"].samples[0].value == 2
    assert abs((results["temp"].samples[0].at - now).total_seconds()) < 0.002
    assert results["temp"].samples_processed == 16
    assert {call.caller for call in calls.calls()} == {"scan_gpu_health"}


@pytest.mark.case("D33")
def test_nasty_query_means_the_same_after_the_journey(metrics):
    query = 'label_replace(vector(1), "x", "A&B 50% +{}=\\"", "", "")'
    (sample,) = metrics.query_many(CLUSTER, {"q": query}, datetime.now(UTC))["q"].samples
    assert sample.labels["x"] == 'A&B 50% +{}="'


def test_wrong_promql_is_rejected_with_the_parsers_words(metrics):
    result = metrics.query_many(CLUSTER, {"q": "sum("}, datetime.now(UTC))["q"]
    assert result.problem is not None
    assert result.problem.code == "amp_query_rejected"
    assert "parse error" in result.problem.text


def test_unknown_workspace_names_the_policys_fields(metrics):
    cluster = ClusterPolicy("prod", "ws-none", "us-east-1")
    result = metrics.query_many(cluster, {"q": "up"}, datetime.now(UTC))["q"]
    assert result.problem is not None
    assert result.problem.code in ("amp_query_rejected", "amp_forbidden")
    assert "ws-none" in result.problem.text


@pytest.mark.case("D32")
@pytest.mark.parametrize(
    ("status", "code"), [(422, "amp_timeout"), (200, "amp_partial"), (403, "amp_forbidden")]
)
def test_faults_of_amp_make_answers_unknown(metrics, faults, status, code):
    fault = ApiFault(verb="query", status=status, service="amp")
    faults.add(fault)
    result = metrics.query_many(CLUSTER, {"q": "up"}, datetime.now(UTC))["q"]
    faults.remove(fault)
    assert result.problem is not None
    assert result.problem.code == code


def test_throttling_that_passes_is_not_seen(metrics, faults):
    faults.add(ApiFault(verb="query", status=429, service="amp", times=1))
    result = metrics.query_many(CLUSTER, {"q": "up"}, datetime.now(UTC))["q"]
    assert result.problem is None
