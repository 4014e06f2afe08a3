"""Sight over a real Prometheus: the shipped scrape configuration, counters file and checks.

Four clusters share the workspace: `shop` is scraped as docs/dcgm-exporter says, `half` has an older
counters file on one of its nodes, `mig` is a published page of a node with MIG, and `bare` is
scraped without any of the labels that a rule needs.
"""

import json
import shutil
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from botocore.credentials import Credentials
from werkzeug.wrappers import Request, Response

from local.amp.exporter import Dialect, ExporterApp, GpuFleet, Pod, counters_file_metrics
from local.amp.front import AmpFront
from local.amp.gpus import METRICS_BY_NAME, RENAMED, XID_COUNT
from local.amp.prometheus import PrometheusServer
from local.amp.serving import serve
from local.calls import ApiFault, CallLog, FaultPlan
from local.identity import Identities
from nodemend.adapters.amp import AmpMetrics
from nodemend.adapters.system import SystemClock
from nodemend.application.sight import SightPorts, check_sight, look, nodes_without
from nodemend.catalogue import load_catalogue
from nodemend.domain.coverage import MetricKind, coverage_query, read_coverage
from nodemend.domain.faults import Family, FaultClass, FaultKind, Verdict
from nodemend.domain.findings import node_names_of
from nodemend.domain.policy import ClusterPolicy, Policy
from nodemend.domain.rules import Rule
from tests.fakes.messages import MemoryEventBus, MemoryTelemetry
from tests.fakes.stores import MemoryScanMemory

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "dcgm-exporter"
PAGE = ROOT / "tests" / "data" / "dcgm" / "mig-a800.prom"
SIMULATED = {*METRICS_BY_NAME, *RENAMED, XID_COUNT}
SHOP = {f"ip-10-9-0-{n}.ec2.internal": n for n in (1, 2, 3)}
NEW, OLD = "ip-10-9-1-1.ec2.internal", "ip-10-9-1-2.ec2.internal"
JOB_POD = Pod("train", "llm-0")
OLD_COUNTERS = ["DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_UTIL"]

RULES = {
    "nodemend-recordings": [
        {"record": "nodemend:gpus:count", "expr": "count(DCGM_FI_DEV_GPU_TEMP)"},
        # Two metrics with the same labels: under one name they are one series twice.
        {
            "record": "nodemend:temperatures:twice",
            "expr": '{__name__=~"DCGM_FI_DEV_(GPU|MEMORY)_TEMP"}',
        },
    ],
    "web": [{"record": "web:twice", "expr": '{__name__=~"DCGM_FI_DEV_(GPU|MEMORY)_TEMP"}'}],
}


class ShippedPrometheus(PrometheusServer):
    """Prometheus with the repository's own scrape configuration; only discovery is replaced."""

    def __init__(self, targets, **options):
        super().__init__([], sd_url="", exporter_address="", history_s=0, **options)
        self._targets = targets

    def _configure(self):
        document = runnable(yaml.safe_load((DOCS / "prometheus.yml").read_text()), self._targets)
        document["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
        document["global"]["evaluation_interval"] = "1s"
        document["rule_files"] = self._rule_files
        del document["remote_write"]
        bare = {"file_sd_configs": [{"files": [self._targets]}], "job_name": "bare"}
        keep = {"source_labels": ["__meta_bare"], "regex": "yes", "action": "keep"}
        document["scrape_configs"].append(bare | {"relabel_configs": [keep]})
        (self._place() / "prometheus.yml").write_text(yaml.safe_dump(document, sort_keys=False))


def runnable(document, targets):
    """Replace discovery in Kubernetes: packages of Prometheus are built without it at times."""
    for job in document["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        job["file_sd_configs"] = [{"files": [str(targets)]}]
    return document


def pod_target(port, node, cluster, path, *, name="dcgm-exporter", container_port=9400, **more):
    """Return a target as Kubernetes discovery announces a pod."""
    labels = {
        "__metrics_path__": path,
        "__meta_kubernetes_pod_label_app_kubernetes_io_name": name,
        "__meta_kubernetes_pod_container_port_number": str(container_port),
        "__meta_kubernetes_pod_phase": "Running",
        "__meta_kubernetes_pod_node_name": node,
        "__meta_kubernetes_namespace": "gpu-monitoring",
        "__meta_kubernetes_pod_name": f"exporter-on-{node[:10]}",
        "__meta_kubernetes_pod_container_name": "exporter",
        "cluster": cluster,
    }
    return {"targets": [f"127.0.0.1:{port}"], "labels": labels | more}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    shop = GpuFleet(metrics=counters_file_metrics((DOCS / "counters.csv").read_text()), seed=1)
    dialects = [
        Dialect(),
        Dialect(hostname="dcgm-exporter-cwbcm"),
        Dialect(hostname_label="hostname"),
    ]
    for node, dialect in zip(SHOP, dialects, strict=True):
        shop.add_node(node, pod=JOB_POD, dialect=dialect)
    new = GpuFleet(metrics=counters_file_metrics((DOCS / "counters.csv").read_text()), seed=2)
    new.add_node(NEW)
    old = GpuFleet(metrics=OLD_COUNTERS, seed=3)
    old.add_node(OLD)
    bare = GpuFleet(seed=4)
    bare.add_node("gone", dialect=Dialect(hostname_label=None, has_uuid=False), gpus=2)
    exporter = ExporterApp({"all": [shop, new, old, bare]})

    def app(environ, start_response):
        if Request(environ).path == "/mig":
            text = PAGE.read_text()
            page = Response(text, content_type="text/plain; version=0.0.4; charset=utf-8")
            return page(environ, start_response)
        return exporter(environ, start_response)

    pages = serve(app)
    targets = [
        pod_target(pages.port, node, "shop", f"/fleets/0/nodes/{node}/metrics") for node in SHOP
    ]
    targets += [
        pod_target(pages.port, NEW, "half", f"/fleets/1/nodes/{NEW}/metrics"),
        pod_target(pages.port, OLD, "half", f"/fleets/2/nodes/{OLD}/metrics"),
        pod_target(pages.port, "gpu-node-35", "mig", "/mig"),
        # Neither another port of the exporter's pod nor another pod is scraped.
        pod_target(pages.port, NEW, "shop", "/mig", container_port=9401),
        pod_target(pages.port, NEW, "shop", "/mig", name="web"),
        {
            "targets": [f"127.0.0.1:{pages.port}"],
            "labels": {
                "__metrics_path__": "/fleets/3/nodes/gone/metrics",
                "__meta_bare": "yes",
                "cluster": "bare",
            },
        },
    ]
    place = tmp_path_factory.mktemp("sight")
    (place / "targets.json").write_text(json.dumps(targets))
    groups = [{"name": n, "interval": "1s", "rules": r} for n, r in RULES.items()]
    (place / "alerts.yml").write_text(yaml.safe_dump({"groups": groups}))
    prometheus = ShippedPrometheus(str(place / "targets.json"), rule_files=[place / "alerts.yml"])
    identities, faults, calls = Identities(), FaultPlan(), CallLog()
    urls: dict[str, str] = {}
    front = AmpFront(urls, identities=identities, faults=faults, calls=calls)
    server = serve(front)
    with prometheus:
        urls["ws-1"] = prometheus.url
        deadline = time.monotonic() + 20
        while len(prometheus.query("up == 1")) < 7 or not prometheus.query("nodemend:gpus:count"):
            assert time.monotonic() < deadline, prometheus.query("up")
            time.sleep(0.1)
        key = identities.issue("scan_gpu_health")
        yield SimpleNamespace(
            prometheus=prometheus,
            faults=faults,
            calls=calls,
            metrics=AmpMetrics(
                credentials=Credentials(
                    key.access_key_id, key.secret_access_key, key.session_token
                ),
                endpoint_url=server.url,
            ),
        )
    server.stop()
    front.close()
    pages.stop()


def cluster(name):
    return ClusterPolicy(name, "ws-1", "us-east-1", matcher=f'cluster="{name}"')


def coverage_of(world, name):
    coverage, problem, samples = look(
        cluster(name),
        Policy(),
        metrics=world.metrics,
        catalogue=load_catalogue(),
        groups=world.metrics.rule_groups(cluster(name)),
        now=datetime.now(UTC),
    )
    assert problem is None
    assert samples > 0
    return coverage


# --- the shipped configurations -------------------------------------------------------------------


@pytest.mark.parametrize("page", ["prometheus.yml", "scraper.template.yaml"])
def test_promtool_accepts_the_scrape_configuration(tmp_path, page):
    text = (DOCS / page).read_text()
    if page != "prometheus.yml":
        block = text[text.index("            global:") :]
        text = "\n".join(line.removeprefix("            ") for line in block.splitlines())
    document = runnable(yaml.safe_load(text), "/dev/null/*.json")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(document))

    promtool = shutil.which("promtool")
    done = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_gpu_names_its_node_whatever_its_exporter_prints(world):
    """D11, D12: an exporter that prints its pod's name, and one that prints `hostname`."""
    rows = world.prometheus.query('DCGM_FI_DEV_GPU_TEMP{cluster="shop"}')

    assert len(rows) == 24
    assert {node_names_of(row["metric"])[0] for row in rows} == set(SHOP)
    assert {row["metric"].get("Hostname") for row in rows} >= {"dcgm-exporter-cwbcm", None}


@pytest.mark.case("D13")
def test_d13_the_pod_that_holds_the_gpu_is_the_exported_one(world):
    rows = world.prometheus.query('DCGM_FI_DEV_GPU_UTIL{cluster="shop"}')

    assert {row["metric"]["exported_pod"] for row in rows} == {JOB_POD.name}
    assert {row["metric"]["exported_namespace"] for row in rows} == {JOB_POD.namespace}
    assert {row["metric"]["namespace"] for row in rows} == {"gpu-monitoring"}


def test_no_rule_is_blind_as_far_as_the_simulated_exporter_goes(world):
    coverage = coverage_of(world, "shop")

    blind = [
        one.rule_id
        for one in coverage.blind
        if not one.missing or any(set(metric.names) & SIMULATED for metric in one.missing)
    ]
    assert blind == []
    seen = [m for m in coverage.metrics if m.kind is MetricKind.GPU and set(m.names) & SIMULATED]
    assert len(seen) >= 7
    assert {(metric.seen, metric.total) for metric in seen} == {(24, 24)}


# --- what is missing ------------------------------------------------------------------------------


def test_half_of_the_fleet_with_an_older_counters_file_is_seen_and_named(world):
    coverage = coverage_of(world, "half")

    (blind,) = [one for one in coverage.blind if one.rule_id == "ecc-dbe-volatile"]
    assert blind.reason.code == "exported_in_part"
    assert (blind.missing[0].seen, blind.missing[0].total) == (8, 16)
    assert not blind.is_expected
    assert nodes_without(
        blind.missing[0],
        coverage,
        cluster("half"),
        metrics=world.metrics,
        now=datetime.now(UTC),
    ) == (OLD,)
    assert "xid-new" not in {one.rule_id for one in coverage.blind}


@pytest.mark.case("D45")
def test_d45_remap_rules_are_blind_on_the_mig_gpu_of_a_published_page(world):
    names = {
        "xid": ("DCGM_FI_DEV_XID_ERRORS",),
        "remapped": ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",),
    }
    rules = [rule("xid", "xid"), rule("remapped", "remapped")]
    query = coverage_query(rules, names, matcher='cluster="mig"')
    answer = world.metrics.query_many(cluster("mig"), {"q": query}, datetime.now(UTC))["q"]

    coverage = read_coverage(rules, names, answer.samples)

    assert [(m.metric, m.seen, m.total) for m in coverage.metrics] == [
        ("remapped", 7, 8),
        ("xid", 8, 8),
    ]
    (blind,) = coverage.blind
    assert (blind.rule_id, blind.reason.code) == ("remapped", "exported_in_part")
    assert blind.is_expected
    assert "MIG" in blind.reason.text


def rule(rule_id, metric):
    return Rule(
        id=rule_id,
        family=Family.ECC,
        fault_class=FaultClass.XID,
        verdict=Verdict.SUSPECT,
        kind=FaultKind.LEVEL,
        promql=f"[[{metric}]] > 0",
        thresholds={},
        summary="",
        why="",
        source="",
        metrics=(metric,),
    )


def test_gpus_without_uuid_and_node_are_told(world):
    coverage = coverage_of(world, "bare")

    labels = {one.rule_id: one.reason.text for one in coverage.blind if not one.missing}
    assert set(labels) == {"label-uuid", "label-node"}
    assert labels["label-node"].startswith("2 of 2 GPUs")


@pytest.mark.case("D6")
def test_d6_a_metric_that_says_not_supported_is_not_there(world):
    names = {"temp": ("made_up",)}
    answer = world.prometheus.query
    query = coverage_query([rule("t", "temp")], names).replace("made_up", "(vector(9.3e18))")
    assert answer(query) == []
    query = coverage_query([rule("t", "temp")], names).replace("made_up", "(vector(2147483634))")
    assert answer(query) == []
    query = coverage_query([rule("t", "temp")], names).replace("made_up", "(vector(41))")
    assert [row["value"][1] for row in answer(query)] == ["1"]


# --- rule groups ----------------------------------------------------------------------------------


def test_a_recording_rule_that_fails_is_seen_with_amps_words_and_other_peoples_are_not(world):
    ports = SightPorts(
        metrics=world.metrics,
        rule_groups=world.metrics,
        bus=MemoryEventBus(),
        memory=MemoryScanMemory(SystemClock()),
        telemetry=MemoryTelemetry(),
        catalogue=load_catalogue(),
    )
    for _ in range(3):
        check_sight(cluster("shop"), Policy(), ports=ports, now=datetime.now(UTC))

    details = [one.detail for one in ports.bus.accepted]
    (groups,) = [detail for detail in details if detail["cause"] == "rule_groups"]
    (found,) = groups["rules"]
    assert found["rule_id"] == "nodemend-recordings/nodemend:temperatures:twice"
    assert found["reason"]["code"] == "rule_failing"
    assert "same labelset" in found["reason"]["text"]


def test_rule_groups_are_read_with_interval_time_and_namespace(world):
    answer = world.metrics.rule_groups(cluster("shop"))

    assert answer.problem is None
    groups = {group.name: group for group in answer.groups}
    ours = groups["nodemend-recordings"]
    assert (ours.namespace, ours.interval_s) == ("alerts", 1.0)
    assert 0 < ours.evaluation_s < 1
    health = {one.name: one.health for one in ours.rules}
    assert health == {"nodemend:gpus:count": "ok", "nodemend:temperatures:twice": "err"}
    evaluated = ours.rules[0].evaluated_at
    assert abs((datetime.now(UTC) - evaluated).total_seconds()) < 10
    assert world.calls.calls()[-1].verb == "rules"


def test_rule_groups_that_may_not_be_listed_are_told_with_the_action(world):
    fault = ApiFault("rules", 403, service="amp")
    world.faults.add(fault)
    try:
        answer = world.metrics.rule_groups(cluster("shop"))
    finally:
        world.faults.remove(fault)

    assert answer.problem is not None
    assert answer.problem.code == "amp_forbidden"
    assert "allow aps:ListRules" in answer.problem.text
