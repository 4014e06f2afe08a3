"""What a scan costs: samples that a real Prometheus counts, as AMP bills them."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from local.amp.prometheus import PrometheusServer
from nodemend.domain.faults import Family
from nodemend.domain.rules import Rule, render_query, render_template
from tests.integration.rules.scenarios import CATALOGUE

NODES, GPUS = 4, 8
SCRAPE_S = 30
HISTORY_S = 2100
LONG_AGO_S = (3600, 86_400, 604_800)
"""Times at which the rules that look back far find their one sample."""

BUDGET_PER_GPU_AND_MINUTE = 60
"""What the ecc family may read, its recording rules' own evaluations included."""

VALUES = {
    "gpu_temp": 61,
    "slowdown_temp": 89,
    "memory_temp": 70,
    "memory_max_op_temp": 95,
    "gpu_temp_margin": 26,
    "power_usage": 640,
    "energy": 1000000,
    "gpu_util": 98,
    "tensor_active": 0.46,
    "dram_active": 0.38,
    "engine_active": 0.96,
    "clocks_event_reasons": 4,
    "fabric_manager_status": 3,
    "fabric_health": 1,
    "pcie_link_gen": 5,
    "pcie_link_width": 16,
    "memory_used": 60000,
}
"""A healthy GPU at work; what is not named is 0."""

HEALTH_WATCHES = [
    "PCIE",
    "NVLINK",
    "PMU",
    "MCU",
    "MEM",
    "SM",
    "INFOROM",
    "THERMAL",
    "POWER",
    "DRIVER",
    "ALL",
]


class Fleet:
    """Half an hour of a small fleet that exports every metric that any rule reads."""

    cluster = ""

    def history(self, low: float, high: float, step_s: float) -> Iterator[str]:
        """Yield the lines; power and energy move, so that nothing looks frozen."""
        times = [high - ago for ago in LONG_AGO_S]
        times += [low + number * step_s for number in range(math.ceil((high - low) / step_s) + 1)]
        for name, labels, value in every_series():
            grows = 640_000 if "ENERGY" in name else 0.0001 if "POWER_USAGE" in name else 0
            for at in times:
                yield f"{name}{{{labels}}} {value + grows * (at - low + 1e6)} {at:.0f}"


def every_series() -> Iterator[tuple[str, str, float]]:
    """Yield (name, labels, value)."""
    dcgm = {k: v[0] for k, v in CATALOGUE.metric_names.items() if v[0].startswith("DCGM_")}
    for node in range(NODES):
        held = f'exported_namespace="ml",exported_pod="train-{node}",'
        held += f'namespace="gpu-operator",pod="dcgm-exporter-{node}k2xp"'
        for gpu in range(GPUS):
            identity = f'UUID="GPU-{node}-{gpu}",gpu="{gpu}",Hostname="n{node}",{held}'
            for metric, name in dcgm.items():
                for extra in extra_labels(metric):
                    yield name, identity + extra, VALUES.get(metric, 0)
        for name, labels, value in (
            ("kube_node_labels", 'label_node_kubernetes_io_instance_type="p5.48xlarge"', 1),
            ("kube_node_status_allocatable", 'resource="nvidia_com_gpu"', 8),
            ("kube_node_status_capacity", 'resource="nvidia_com_gpu"', 8),
        ):
            yield name, f'node="n{node}",{labels}', value


def extra_labels(metric: str) -> list[str]:
    """Return what tells the series of one GPU apart."""
    if metric == "gpu_health":
        return [f',health_watch="{watch}",health_error_code="0"' for watch in HEALTH_WATCHES]
    if metric == "xid_errors":
        return [',err_code="0",err_msg="No Error"']
    return [""]


@pytest.fixture(scope="module")
def prometheus() -> Iterator[PrometheusServer]:
    server = PrometheusServer(
        [Fleet()],  # type: ignore[list-item]
        sd_url="http://127.0.0.1:1/sd",
        exporter_address="127.0.0.1:1",
        history_s=HISTORY_S,
        history_step_s=SCRAPE_S,
    )
    with server:
        yield server


def ask(server: PrometheusServer, query: str) -> dict[str, Any]:
    form = {"query": query, "time": server.history_end, "stats": "all"}
    answer = requests.post(f"{server.url}/api/v1/query", data=form, timeout=30).json()
    assert answer["status"] == "success", (query, answer)
    data: dict[str, Any] = answer["data"]
    return data


def samples(server: PrometheusServer, query: str) -> float:
    """Return the samples per GPU that the query reads."""
    return ask(server, query)["stats"]["samples"]["totalQueryableSamples"] / NODES / GPUS


def cost_of(server: PrometheusServer, family: Family) -> dict[str, float]:
    """Return the samples per GPU of each rule, and those of its recordings for each minute."""
    rules = CATALOGUE.of_family(family)
    cost = {r.id: samples(server, render_query(r, CATALOGUE.metric_names)) for r in rules}
    read = {name for rule in rules for name in rule.used}
    for group in CATALOGUE.recordings:
        if read & {one.record for one in group.recordings}:
            for one in group.recordings:
                text = render_template(one.promql, one.record, CATALOGUE.metric_names)
                cost[one.record] = samples(server, text) * 60 / group.interval_s
    return cost


def test_a_healthy_fleet_has_no_finding_of_any_rule(prometheus):
    for rule in CATALOGUE.rules:
        answer = ask(prometheus, render_query(rule, CATALOGUE.metric_names))

        assert answer["result"] == [], rule.id


def test_the_ecc_family_reads_at_most_sixty_samples_per_gpu_and_minute(prometheus):
    cost = cost_of(prometheus, Family.ECC)

    assert all(cost[rule.id] > 0 for rule in CATALOGUE.of_family(Family.ECC) if reads_dcgm(rule))
    assert sum(cost.values()) <= BUDGET_PER_GPU_AND_MINUTE, cost


def reads_dcgm(rule: Rule) -> bool:
    return rule.id != "xid-count" and any(
        name.startswith("DCGM_")
        for metric in rule.metrics
        for name in CATALOGUE.metric_names[metric]
    )


@pytest.mark.parametrize(("family", "bound"), [(Family.THERMAL, 85), (Family.UTILIZATION, 170)])
def test_the_other_families_stay_within_what_they_read_today(prometheus, family, bound):
    cost = cost_of(prometheus, family)

    assert sum(cost.values()) <= bound, cost
