"""A real Prometheus over the simulated exporters."""

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import requests

from local.amp.exporter import GpuFleet, Pod
from local.amp.prometheus import PrometheusError, PrometheusServer
from local.amp.stack import LocalAmp
from local.identity import Identities
from nodemend.catalogue import load_catalogue
from nodemend.domain.findings import Sample
from nodemend.domain.rules import findings_of, render_query

ROOT = Path(__file__).parents[3]
NODE_1, NODE_2, NODE_3, NODE_4 = (f"ip-10-0-1-{number}.ec2.internal" for number in range(1, 5))
MIG_NODE = "ip-10-0-2-1.ec2.internal"


def number(rows):
    assert len(rows) == 1, rows
    return float(rows[0]["value"][1])


@pytest.fixture
def ask_range(site):
    def ask(query, start, end, step_s):
        answer = requests.post(
            f"{site.prometheus.url}/api/v1/query_range",
            data={"query": query, "start": start, "end": end, "step": step_s},
            timeout=30,
        )
        answer.raise_for_status()
        return answer.json()["data"]["result"]

    return ask


# --- the past and the seam


def test_queries_are_answered_from_the_history_within_five_seconds_of_the_start(site):
    assert site.ready_s < 5


def test_an_offset_of_fifteen_minutes_finds_every_gpu_in_the_history(site):
    query = "count(DCGM_FI_DEV_SM_CLOCK offset 15m)"
    # 5 nodes of 8 GPUs, and 7 whole GPUs and 3 MIG rows.
    assert number(site.prometheus.query(query)) == 5 * 8 + 7 + 3
    assert number(site.prometheus.query("min(count_over_time(up[25m] offset 1m))")) >= 49


def test_no_gpu_is_counted_twice_at_the_seam_of_history_and_scrape(site, ask_range):
    start, end = site.prometheus.history_end - 120, site.scraped_at
    assert end > site.prometheus.history_end
    query = 'count by (UUID, __name__) ({__name__=~"DCGM_.+", GPU_I_ID=""})'
    answers = ask_range(query, start, end, 1)
    assert len({row["metric"]["UUID"] for row in answers}) == 5 * 8 + 7
    assert {value for row in answers for _, value in row["values"]} == {"1"}
    lengths = {len(row["values"]) for row in answers}
    assert lengths == {int(end - start) + 1}, "a series has a gap at the seam"


def test_up_of_each_node_is_one_series_across_the_seam(site, ask_range):
    start, end = site.prometheus.history_end - 120, site.scraped_at
    answers = ask_range('count by (instance) (up{job="dcgm-exporter"})', start, end, 1)
    assert len(answers) == 6
    assert {value for row in answers for _, value in row["values"]} == {"1"}


def test_counters_go_on_without_a_reset_and_agree_with_the_power_at_the_seam(site):
    at = site.prometheus.history_end + 6
    selector = f'{{Hostname="{NODE_4}"}}'
    energy = f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{selector}"
    resets = site.prometheus.query(f"max(resets({energy}[20m]))", at=at)
    assert number(resets) == 0
    rates = site.prometheus.query(f"avg(rate({energy}[10m])) / 1000", at=at)
    power = site.prometheus.query(f"avg(avg_over_time(DCGM_FI_DEV_POWER_USAGE{selector}[10m]))", at)
    assert number(rates) == pytest.approx(number(power), rel=0.02)


@pytest.mark.case("D13")
def test_stored_labels_are_those_of_a_collector_that_does_not_honor_labels(site):
    for when in ("", " offset 10m"):
        rows = site.prometheus.query(f'DCGM_FI_DEV_GPU_TEMP{{Hostname="{NODE_4}", gpu="0"}}{when}')
        (labels,) = [row["metric"] for row in rows]
        assert labels["instance"] == "10.0.1.4:9400"
        assert labels["job"] == "dcgm-exporter"
        assert labels["cluster"] == "prod"
        assert labels["exported_pod"] == "job-0"
        assert labels["exported_namespace"] == "train"
        assert labels["pod"].startswith("dcgm-exporter-")


@pytest.mark.case("D12")
def test_nodes_that_print_hostname_in_lower_case_are_there_too(site):
    rows = site.prometheus.query('DCGM_FI_DEV_GPU_TEMP{hostname="ip-10-0-1-9.ec2.internal"}')
    assert len(rows) == 8
    assert all("Hostname" not in row["metric"] for row in rows)


@pytest.mark.case("D8")
def test_mig_rows_collapse_to_the_physical_gpu(site):
    selector = f'{{Hostname="{MIG_NODE}"}}'
    query = site.prometheus.query
    assert number(query(f"count(DCGM_FI_DEV_XID_ERRORS{selector})")) == 10
    assert number(query(f"count(count by (UUID) (DCGM_FI_DEV_XID_ERRORS{selector}))")) == 8
    assert number(query(f"count(DCGM_FI_DEV_ROW_REMAP_FAILURE{selector})")) == 7


# --- faults


def test_a_fault_is_visible_within_three_seconds_and_gone_as_soon(site, eventually):
    query = f'DCGM_FI_DEV_GPU_TEMP{{Hostname="{NODE_1}", gpu="2"}} > 95'
    site.fleet.inject(NODE_1, 2, "temperature", celsius=97)
    eventually(lambda: site.prometheus.query(query), within_s=3)
    site.fleet.clear(NODE_1, 2)
    eventually(lambda: not site.prometheus.query(query), within_s=3)


@pytest.mark.case("D2")
def test_another_xid_is_another_series_and_no_change_of_the_first(site, eventually):
    selector = f'DCGM_FI_DEV_XID_ERRORS{{Hostname="{NODE_2}", gpu="4"}}'

    def code():
        rows = site.prometheus.query(selector)
        return [row["metric"]["err_code"] for row in rows]

    try:
        assert code() == ["0"]
        for xid in (31, 79):
            site.fleet.inject(NODE_2, 4, "xid", code=xid)
            eventually(lambda new=str(xid): new in code())
            # The old series ended with a staleness marker: it is not there beside the new one.
            assert code() == [str(xid)]
        (row,) = site.prometheus.query(selector)
        assert row["value"][1] == "79"
        assert site.prometheus.query(f"changes({selector}[1m]) > 0") == []
        new = site.prometheus.query(f"({selector} > 0) unless ({selector} offset 5m)")
        assert [row["metric"]["err_code"] for row in new] == ["79"]
    finally:
        site.fleet.clear(NODE_2)


@pytest.mark.case("D4")
def test_the_xid_count_is_a_window_and_its_first_hit_is_no_increase(site, eventually):
    selector = f'DCGM_EXP_XID_ERRORS_COUNT{{Hostname="{NODE_3}", gpu="1"}}'

    def xids():
        return [row["metric"].get("xid") for row in site.prometheus.query(selector)]

    try:
        assert xids() == [None]
        site.fleet.inject(NODE_3, 1, "xid", code=79, at=time.time() - 294)
        eventually(lambda: xids() == ["79"])
        assert number(site.prometheus.query(selector)) == 1
        assert site.prometheus.query(f"increase({selector}[1m]) > 0") == []
        eventually(lambda: xids() == [None])
        assert number(site.prometheus.query(selector)) == 0
        seen = site.prometheus.query(f"max_over_time({selector[:-1]}, xid!=''}}[5m]) > 0")
        assert len(seen) == 1
    finally:
        site.fleet.clear(NODE_3)


@pytest.mark.parametrize("rule_id", ["xid-new", "xid-count"])
def test_an_xid_is_judged_by_the_model_that_the_rules_answer_carries(rule_id, site, eventually):
    catalogue = load_catalogue()
    rule = catalogue.rule(rule_id)
    query = render_query(rule, catalogue.metric_names)

    def verdicts():
        rows = site.prometheus.query(query)
        samples = tuple(
            Sample(row["metric"], float(row["value"][1]), datetime.now(UTC)) for row in rows
        )
        found = findings_of(rule, samples, cluster="c", query=query, xids=catalogue.xids)
        return {(one.node_names[0], one.code): (one.verdict, one.action) for one in found}

    try:
        for node, xid in ((NODE_1, 74), (NODE_2, 145), (MIG_NODE, 110)):  # H100, H100, A100
            site.fleet.inject(node, 4, "xid", code=xid)
        wanted = {
            (NODE_1, 74): ("fatal", "reset_gpu"),
            (NODE_2, 145): ("suspect", "none"),
            (MIG_NODE, 110): ("suspect", "none"),
        }
        # The subquery of xid-count looks at whole tens of seconds only.
        found = eventually(lambda: wanted.keys() <= (now := verdicts()).keys() and now, 30)
        assert {key: found[key] for key in wanted} == wanted
    finally:
        for node in (NODE_1, NODE_2, MIG_NODE):
            site.fleet.clear(node)


@pytest.mark.case("D14")
def test_the_series_of_a_lost_gpu_vanish_at_the_next_scrape(site, eventually):
    query = f'count(DCGM_FI_DEV_GPU_TEMP{{Hostname="{NODE_3}"}})'
    site.fleet.inject(NODE_3, 7, "gpu_lost")
    eventually(lambda: number(site.prometheus.query(query)) == 7, within_s=3)
    site.fleet.clear(NODE_3)
    eventually(lambda: number(site.prometheus.query(query)) == 8, within_s=3)


def test_an_exporter_that_is_down_shows_as_up_0_without_series(site, eventually):
    up = 'up{instance="10.0.1.2:9400"}'
    site.fleet.inject(NODE_2, None, "exporter_down")
    eventually(lambda: number(site.prometheus.query(up)) == 0)
    assert site.prometheus.query(f'DCGM_FI_DEV_GPU_TEMP{{Hostname="{NODE_2}"}}') == []
    site.amp.wait_until_scraped()
    site.fleet.clear(NODE_2)
    eventually(lambda: number(site.prometheus.query(up)) == 1)


def test_a_change_of_pods_moves_counters_to_other_series_at_once(site, eventually):
    query = f'DCGM_FI_DEV_GPU_TEMP{{Hostname="{NODE_1}", gpu="0"}}'

    def pods():
        return [row["metric"].get("exported_pod") for row in site.prometheus.query(query)]

    for pod in (None, Pod("train", "job-1"), Pod("train", "job-0")):
        site.fleet.assign(NODE_1, [0], pod)
        eventually(lambda wanted=[pod and pod.name]: pods() == wanted)


# --- nodes


def test_a_node_that_joins_is_scraped_and_one_that_left_is_gone(site):
    name = "ip-10-0-7-7.ec2.internal"
    site.fleet.add_node(name)
    site.amp.wait_until_scraped()
    query = f'count(DCGM_FI_DEV_GPU_TEMP{{Hostname="{name}"}})'
    assert number(site.prometheus.query(query)) == 8
    site.fleet.remove_node(name)
    site.amp.wait_until_scraped()
    assert site.prometheus.query(query) == []
    assert site.prometheus.query('up{instance="10.0.7.7:9400"}') == []


def test_waiting_for_a_node_that_is_not_served_names_it(site):
    with pytest.raises(PrometheusError, match=r"10\.9\.9\.9:9400"):
        site.prometheus.wait_until_scraped([("prod", "10.9.9.9:9400")], after=0, timeout_s=0.2)


# --- the process


def test_a_missing_prometheus_is_told_in_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    server = PrometheusServer([], sd_url="http://127.0.0.1:1/sd", exporter_address="127.0.0.1:1")
    with pytest.raises(PrometheusError, match=r"apt install prometheus.*brew install") as caught:
        server.start()
    assert "\n" not in str(caught.value)


def test_a_configuration_that_prometheus_refuses_is_told_and_leaves_nothing(tmp_path):
    rules = tmp_path / "bad.yaml"
    rules.write_text("groups: [{name: x, rules: [{record: a, expr: 'sum('}]}]")
    server = PrometheusServer(
        [],
        sd_url="http://127.0.0.1:1/sd",
        exporter_address="127.0.0.1:1",
        history_s=0,
        rule_files=[rules],
    )
    with pytest.raises(PrometheusError, match="ended at once"):
        server.start()
    assert server.pid is None


def test_recording_rules_are_evaluated_and_a_second_start_is_refused(tmp_path, eventually):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "groups: [{name: x, rules: [{record: gpus, expr: count(DCGM_FI_DEV_GPU_TEMP)}]}]"
    )
    fleet = GpuFleet()
    fleet.add_node(NODE_1)
    amp = LocalAmp({"ws-1": [fleet]}, identities=Identities(), history_s=120, rule_files=[rules])
    with amp:
        server = amp.prometheus["ws-1"]
        pid, url = server.pid, server.url
        assert number(eventually(lambda: server.query("gpus"))) == 8
        with pytest.raises(PrometheusError, match="running already"):
            server.start()
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/-/ready", timeout=2)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    amp.stop()


def test_a_history_across_block_borders_has_every_step(eventually):
    fleet = GpuFleet(metrics=["DCGM_FI_DEV_GPU_TEMP"])
    fleet.add_node(NODE_1, "g5.xlarge")
    with LocalAmp({"ws-1": [fleet]}, identities=Identities(), history_s=5 * 3600) as amp:
        server = amp.prometheus["ws-1"]
        at = server.history_end
        rows = server.query("count_over_time(DCGM_FI_DEV_GPU_TEMP[5h])", at=at)
        # Prometheus 3 leaves the sample at the window's left edge out.
    assert number(rows) in (5 * 120, 5 * 120 + 1)


def test_prometheus_ends_with_a_parent_that_is_killed(eventually):
    script = (
        "import sys, time\n"
        "from local.amp.prometheus import PrometheusServer\n"
        "server = PrometheusServer([], sd_url='http://127.0.0.1:1/sd',"
        " exporter_address='127.0.0.1:1', history_s=0)\n"
        "server.start()\n"
        "print(server.url, server._directory, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        url, directory = parent.stdout.readline().split()
        assert requests.get(f"{url}/-/ready", timeout=5).status_code == 200
        parent.send_signal(signal.SIGKILL)
        parent.wait()

    def is_gone():
        try:
            requests.get(f"{url}/-/ready", timeout=1)
        except requests.ConnectionError:
            return True
        return False

    eventually(is_gone)
    eventually(lambda: not Path(directory).exists())
