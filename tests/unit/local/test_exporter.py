"""The simulated dcgm-exporters print what real ones do."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
from werkzeug.test import Client

from local.amp.exporter import (
    Dialect,
    ExporterApp,
    FaultKind,
    GpuFleet,
    MigInstance,
    Pod,
    counters_file_metrics,
)
from local.amp.gpus import A800, METRICS

DATA = Path(__file__).parents[2] / "data" / "dcgm"
NODE = "ip-10-0-1-5.ec2.internal"
LINE = re.compile(r"(\w+)\{(.*)\} (\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Time:
    def __init__(self):
        self.now = 1_800_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Time()


@pytest.fixture
def fleet(clock):
    fleet = GpuFleet("prod", clock=clock)
    fleet.add_node(NODE, "p5.48xlarge", pod=Pod("train", "job-0"))
    return fleet


def samples(text, name=None, **labels):
    """Parse a page into (name, labels, value), in the order of the page."""
    found = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        metric, inside, value = LINE.fullmatch(line).groups()
        pairs = LABEL.findall(inside)
        assert ",".join(f'{k}="{v}"' for k, v in pairs) == inside
        row = dict(pairs)
        assert len(row) == len(pairs), f"a label twice in {line}"
        if name in (None, metric) and labels.items() <= row.items():
            found.append((metric, row, value))
    return found


def page(fleet, name=NODE):
    status, text = fleet.scrape(name)
    assert status == 200
    return text


def value(fleet, metric, gpu=0, name=NODE):
    rows = samples(page(fleet, name), metric, gpu=str(gpu))
    assert len(rows) == 1, rows
    return float(rows[0][2])


# --- shape


@pytest.mark.case("D45")
def test_rows_and_labels_are_those_of_the_published_mig_scrape(clock):
    published = samples((DATA / "mig-a800.prom").read_text())
    wanted_metrics = list(dict.fromkeys(name for name, _, _ in published))
    fleet = GpuFleet(clock=clock, metrics=wanted_metrics)
    fleet.add_node(
        "gpu-node-35",
        "onprem-a800",
        gpus=8,
        model=A800,
        mig={0: [MigInstance("2g.20gb", number) for number in (3, 5, 6)]},
        dialect=Dialect(driver_version="535.129.03", has_pci_bus_id=False, has_xid_labels=False),
    )
    ours = samples(page(fleet, "gpu-node-35"))

    def shape(rows):
        return {
            (name, labels["gpu"], labels.get("GPU_I_ID"), tuple(labels)) for name, labels, _ in rows
        }

    assert shape(ours) == shape(published)
    assert len(ours) == len(published)

    def constant(rows):
        dropped = {"UUID"}
        return {
            (name, *(f"{k}={v}" for k, v in labels.items() if k not in dropped))
            for name, labels, _ in rows
        }

    assert constant(ours) == constant(published)


def test_labels_of_an_allocated_gpu_stand_in_the_exporters_order(fleet):
    fleet.inject(NODE, 2, "xid", code=79)
    (_, labels, number), *_ = samples(page(fleet), "DCGM_FI_DEV_XID_ERRORS", gpu="2")
    assert list(labels) == [
        "gpu",
        "UUID",
        "pci_bus_id",
        "device",
        "modelName",
        "Hostname",
        "DCGM_FI_DRIVER_VERSION",
        "container",
        "err_code",
        "err_msg",
        "namespace",
        "pod",
    ]
    assert labels["modelName"] == "NVIDIA H100 80GB HBM3"
    assert labels["pci_bus_id"] == "00000000:75:00.0"
    assert (labels["err_code"], labels["err_msg"]) == ("79", "GPU has fallen off the bus")
    assert number == "79"


def test_an_idle_gpu_has_no_pod_labels_and_a_pod_brings_them(fleet):
    fleet.assign(NODE, [1], None)
    rows = samples(page(fleet), "DCGM_FI_DEV_GPU_UTIL")
    assert [("pod" in labels) for _, labels, _ in rows] == [True, False] + [True] * 6
    assert value(fleet, "DCGM_FI_DEV_GPU_UTIL", 1) == 0
    assert value(fleet, "DCGM_FI_DEV_GPU_UTIL", 0) > 90
    fleet.assign(NODE, [1], Pod("infer", "llm-0", "server"))
    ((_, labels, _),) = samples(page(fleet), "DCGM_FI_DEV_GPU_UTIL", gpu="1")
    assert (labels["namespace"], labels["pod"], labels["container"]) == ("infer", "llm-0", "server")


def test_doubles_have_six_decimals_and_integers_none(fleet):
    text = page(fleet)
    for _, _, number in samples(text, "DCGM_FI_DEV_POWER_USAGE"):
        assert re.fullmatch(r"\d+\.\d{6}", number)
    for _, _, number in samples(text, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"):
        assert re.fullmatch(r"\d+", number)


@pytest.mark.case("D12")
def test_the_hostname_label_and_its_value_follow_the_nodes_dialect(fleet):
    fleet.set_dialect(NODE, Dialect(hostname_label="hostname"))
    assert all(row["hostname"] == NODE for _, row, _ in samples(page(fleet)))
    fleet.set_dialect(NODE, Dialect(hostname="nvidia-dcgm-exporter-cwbcm", has_uuid=False))
    rows = samples(page(fleet))
    assert all(row["Hostname"] == "nvidia-dcgm-exporter-cwbcm" for _, row, _ in rows)
    assert not any("UUID" in row for _, row, _ in rows)
    fleet.set_dialect(NODE, Dialect(hostname_label=None))
    assert not any("ostname" in name for _, row, _ in samples(page(fleet)) for name in row)


@pytest.mark.case("D8")
def test_mig_rows_repeat_the_gpus_values_and_share_its_memory(clock):
    fleet = GpuFleet(clock=clock)
    mig = [MigInstance("1g.10gb", number) for number in range(7, 14)]
    fleet.add_node(NODE, "p4de.24xlarge", mig={0: mig})
    fleet.inject(NODE, 0, "xid", code=79)
    text = page(fleet)
    xids = samples(text, "DCGM_FI_DEV_XID_ERRORS", gpu="0")
    assert [row["GPU_I_ID"] for _, row, _ in xids] == [str(number) for number in range(7, 14)]
    assert len({row["UUID"] for _, row, _ in xids}) == 1
    assert {number for _, _, number in xids} == {"79"}
    assert len(samples(text, "DCGM_EXP_XID_ERRORS_COUNT", gpu="0", xid="79")) == 7
    assert samples(text, "DCGM_FI_DEV_GPU_UTIL", gpu="0") == []
    free = sum(int(number) for _, _, number in samples(text, "DCGM_FI_DEV_FB_FREE", gpu="0"))
    (_, _, whole) = samples(text, "DCGM_FI_DEV_FB_FREE", gpu="1")[0]
    assert free == pytest.approx(int(whole), rel=0.01)


def test_a_counters_file_decides_which_metrics_are_printed_and_under_which_name(clock):
    names = counters_file_metrics(
        "# comment\n"
        "DCGM_FI_DEV_GPU_TEMP_CELSIUS, gauge, Temperature.\n"
        "# DCGM_FI_DEV_POWER_USAGE, gauge, off\n"
        "DCGM_FI_DRIVER_VERSION, label, Driver Version\n"
        "DCGM_FI_DEV_XID_ERROR, gauge, Last XID.\n"
        "DCGM_FI_DEV_NOT_SIMULATED, gauge, ?\n"
    )
    fleet = GpuFleet(metrics=names, clock=clock)
    fleet.add_node(NODE)
    fleet.inject(NODE, 0, "xid", code=48)
    rows = samples(page(fleet))
    assert list(dict.fromkeys(name for name, _, _ in rows)) == [
        "DCGM_FI_DEV_GPU_TEMP_CELSIUS",
        "DCGM_FI_DEV_XID_ERROR",
    ]
    assert samples(page(fleet), "DCGM_FI_DEV_XID_ERROR", err_code="48")[0][2] == "48"


def test_gpus_without_nvlink_or_memory_sensor_print_what_their_drivers_do(clock):
    fleet = GpuFleet(clock=clock)
    fleet.add_node(NODE, "g6.48xlarge")
    text = page(fleet)
    assert "NVLINK" not in text
    assert {number for _, _, number in samples(text, "DCGM_FI_DEV_MEMORY_TEMP")} == {"0"}


def test_every_metric_has_help_type_and_one_row_per_gpu(fleet):
    text = page(fleet)
    for metric in METRICS:
        assert f"# TYPE {metric.name} {metric.type}\n" in text
        assert [row["gpu"] for _, row, _ in samples(text, metric.name)] == list("01234567")


# --- time


def test_the_same_seed_gives_the_same_page_and_another_seed_another_one(clock):
    def make(seed):
        fleet = GpuFleet("prod", seed=seed, clock=clock)
        fleet.add_node(NODE)
        return page(fleet)

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_energy_is_the_integral_of_the_power_through_allocation_and_hang(clock):
    names = ["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_POWER_USAGE"]
    fleet = GpuFleet(metrics=names, clock=clock)
    fleet.add_node(NODE, "g5.xlarge", pod=Pod("train", "job-0"))

    def joules():
        return value(fleet, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION") / 1000

    before, used = joules(), 0.0
    for second in range(600):
        if second == 100:
            fleet.assign(NODE, None, None)
        if second == 200:
            fleet.assign(NODE, None, Pod("train", "job-1"))
        if second == 300:
            fleet.inject(NODE, 0, "hang")
        if second == 400:
            fleet.clear(NODE, 0, "hang")
        used += value(fleet, "DCGM_FI_DEV_POWER_USAGE")
        clock.now += 1
        assert joules() >= before
    assert joules() - before == pytest.approx(used, rel=0.01)


def test_counters_never_fall_while_nothing_is_cleared(fleet, clock):
    counters = [metric.name for metric in METRICS if metric.type == "counter"]
    counters.remove("DCGM_EXP_XID_ERRORS_COUNT")
    last = {}
    for _ in range(50):
        text = page(fleet)
        for name in counters:
            for _, row, number in samples(text, name):
                key = name, row["gpu"]
                assert int(number) >= last.get(key, 0)
                last[key] = int(number)
        clock.now += 7


def test_history_ends_where_scraping_begins_with_the_labels_prometheus_stores(fleet, clock):
    lines = list(fleet.history(clock.now - 60, clock.now, 30))
    temperatures = [line for line in lines if line.startswith("DCGM_FI_DEV_GPU_TEMP{")]
    assert len(temperatures) == 8 * 3
    stamps = {line.rsplit(" ", 1)[1] for line in lines}
    assert stamps == {f"{clock.now - back:.3f}" for back in (60, 30, 0)}
    labels = dict(LABEL.findall(temperatures[0]))
    assert labels["instance"] == "10.0.1.5:9400"
    assert labels["job"] == "dcgm-exporter"
    assert labels["cluster"] == "prod"
    assert (labels["exported_pod"], labels["exported_namespace"]) == ("job-0", "train")
    assert labels["pod"].startswith("dcgm-exporter-")
    ups = [line for line in lines if line.startswith("up{")]
    assert [line.split("} ")[1].split()[0] for line in ups] == ["1", "1", "1"]
    newest = [line for line in temperatures if line.endswith(f" {clock.now:.3f}")]
    scraped = samples(page(fleet), "DCGM_FI_DEV_GPU_TEMP")
    assert [line.split("} ")[1].split()[0] for line in newest] == [n for _, _, n in scraped]


def test_without_pod_discovery_nothing_is_renamed(clock):
    fleet = GpuFleet(clock=clock, announces_pods=False)
    fleet.add_node(NODE, pod=Pod("train", "job-0"), labels={"node": NODE})
    line = next(li for li in fleet.history(clock.now, clock.now, 30) if li.startswith("DCGM"))
    labels = dict(LABEL.findall(line))
    assert labels["pod"] == "job-0"
    assert labels["node"] == NODE
    assert not any(name.startswith("exported_") for name in labels)


# --- faults


@pytest.mark.case("D1")
def test_an_xid_stays_in_the_gauge_and_leaves_the_window_count_after_five_minutes(fleet, clock):
    fleet.inject(NODE, 3, "xid", code=79)
    clock.now += 299
    assert value(fleet, "DCGM_FI_DEV_XID_ERRORS", 3) == 79
    (_, labels, number) = samples(page(fleet), "DCGM_EXP_XID_ERRORS_COUNT", gpu="3")[0]
    assert (labels["xid"], labels["window_size_in_ms"], number) == ("79", "300000", "1")
    clock.now += 1
    assert value(fleet, "DCGM_FI_DEV_XID_ERRORS", 3) == 79
    (_, labels, number) = samples(page(fleet), "DCGM_EXP_XID_ERRORS_COUNT", gpu="3")[0]
    assert "xid" not in labels
    assert number == "0"
    clock.now += 172_800
    assert value(fleet, "DCGM_FI_DEV_XID_ERRORS", 3) == 79


@pytest.mark.case("D3")
def test_a_later_xid_masks_the_first_in_the_gauge_but_not_in_the_count(fleet, clock):
    fleet.inject(NODE, 0, "xid", code=62)
    clock.now += 1
    fleet.inject(NODE, 0, "xid", code=45, count=2)
    assert value(fleet, "DCGM_FI_DEV_XID_ERRORS") == 45
    counts = samples(page(fleet), "DCGM_EXP_XID_ERRORS_COUNT", gpu="0")
    assert {row["xid"]: number for _, row, number in counts} == {"62": "1", "45": "2"}


def test_an_xid_that_the_exporter_has_no_text_for_is_an_unknown_error(fleet):
    fleet.inject(NODE, 0, "xid", code=999)
    assert samples(page(fleet), "DCGM_FI_DEV_XID_ERRORS", err_msg="Unknown Error", err_code="999")
    zero = samples(page(fleet), "DCGM_FI_DEV_XID_ERRORS", gpu="1")[0][1]
    assert (zero["err_code"], zero["err_msg"]) == ("0", "No Error")


def test_every_series_of_a_lost_gpu_vanishes_and_comes_back(fleet):
    lost = fleet.inject(NODE, 5, "gpu_lost")
    assert {row["gpu"] for _, row, _ in samples(page(fleet))} == set("0123467")
    fleet.lift(lost[0])
    assert {row["gpu"] for _, row, _ in samples(page(fleet))} == set("01234567")


@pytest.mark.parametrize(
    ("kind", "params", "metric", "expected"),
    [
        ("dbe", {"count": 3}, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 3),
        ("sbe", {}, "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", 1),
        ("row_remap_failed", {}, "DCGM_FI_DEV_ROW_REMAP_FAILURE", 1),
        ("row_remap_pending", {}, "DCGM_FI_DEV_ROW_REMAP_PENDING", 1),
        ("temperature", {"celsius": 96}, "DCGM_FI_DEV_GPU_TEMP", 96),
        (
            "temperature",
            {"celsius": 70, "memory_celsius": 99},
            "DCGM_FI_DEV_MEMORY_TEMP",
            99,
        ),
        ("recovery_action", {"action": 2}, "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", 2),
        ("idle", {}, "DCGM_FI_DEV_GPU_UTIL", 0),
        ("idle", {}, "DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0),
        ("hang", {}, "DCGM_FI_DEV_GPU_UTIL", 100),
        ("hang", {}, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 0),
        ("clock_reasons", {"mask": 0x80, "sm_clock": 300}, "DCGM_FI_DEV_SM_CLOCK", 300),
        (
            "set",
            {"metric": "DCGM_FI_DEV_GPU_TEMP_CELSIUS", "value": 42},
            "DCGM_FI_DEV_GPU_TEMP",
            42,
        ),
    ],
)
def test_a_fault_shows_on_its_gpu_alone_and_is_gone_when_cleared(
    fleet, kind, params, metric, expected
):
    before = [value(fleet, metric, gpu) for gpu in range(8)]
    assert before[4] != expected
    fleet.inject(NODE, 4, kind, **params)
    assert value(fleet, metric, 4) == expected
    assert [value(fleet, metric, gpu) for gpu in (0, 7)] == [before[0], before[7]]
    assert [fault.kind for fault in fleet.faults(NODE)] == [FaultKind(kind)]
    assert fleet.clear(NODE, 4, kind) == 1
    assert value(fleet, metric, 4) == before[4]
    assert fleet.faults(NODE) == []


@pytest.mark.case("D6")
def test_a_blank_value_is_printed_in_full_as_old_exporters_do(fleet):
    blank = 9223372036854775794
    fleet.inject(NODE, 0, "set", metric="DCGM_FI_DEV_MEMORY_TEMP", value=blank)
    assert samples(page(fleet), "DCGM_FI_DEV_MEMORY_TEMP", gpu="0")[0][2] == str(blank)


def test_setting_a_metric_to_none_takes_its_series_away(fleet):
    for metric in ("DCGM_FI_DEV_ROW_REMAP_PENDING", "DCGM_EXP_XID_ERRORS_COUNT"):
        fleet.inject(NODE, None, "set", metric=metric, value=None)
        assert samples(page(fleet), metric) == []


def test_a_straggler_is_slower_than_its_siblings_but_as_busy(fleet):
    before = value(fleet, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 1)
    fleet.inject(NODE, 1, "straggler", factor=0.5)
    assert value(fleet, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 1) == pytest.approx(before / 2, abs=1e-5)
    assert value(fleet, "DCGM_FI_DEV_GPU_UTIL", 1) > 90


@pytest.mark.case("D20")
def test_throttling_sets_the_bits_and_runs_the_violation_counter_in_nanoseconds(fleet, clock):
    fleet.inject(NODE, 0, "clock_reasons", mask=0x40)
    clock.now += 3
    assert value(fleet, "DCGM_FI_DEV_THERMAL_VIOLATION") == 3e9
    assert value(fleet, "DCGM_FI_DEV_POWER_VIOLATION") == 0
    assert int(value(fleet, "DCGM_FI_DEV_CLOCKS_EVENT_REASONS")) & 0x40
    fleet.clear(NODE)
    clock.now += 10
    assert value(fleet, "DCGM_FI_DEV_THERMAL_VIOLATION") == 3e9
    assert not int(value(fleet, "DCGM_FI_DEV_CLOCKS_EVENT_REASONS")) & 0x40


def test_a_rate_grows_while_it_lasts_and_keeps_its_height(fleet, clock):
    metric = "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"
    fleet.inject(NODE, 2, "rate", metric=metric, per_second=50)
    clock.now += 10
    assert value(fleet, metric, 2) == 500
    fleet.clear(NODE, 2, "rate")
    clock.now += 10
    assert value(fleet, metric, 2) == 500


@pytest.mark.case("D16")
def test_a_frozen_exporter_repeats_its_page_bit_by_bit(fleet, clock):
    fleet.inject(NODE, None, "frozen")
    first = page(fleet)
    fleet.inject(NODE, 0, "temperature", celsius=99, at=clock.now + 1)
    clock.now += 600
    assert page(fleet) == first
    fleet.clear(NODE, kind="frozen")
    assert page(fleet) != first


def test_an_exporter_that_is_down_answers_503_until_its_time_is_over(fleet, clock):
    fleet.inject(NODE, None, "exporter_down", until=clock.now + 5)
    assert fleet.scrape(NODE)[0] == 503
    assert "} 0 " in next(fleet.history(clock.now, clock.now, 30))
    clock.now += 5
    assert fleet.scrape(NODE)[0] == 200


def test_a_reboot_clears_what_a_driver_reload_clears_and_leaves_broken_hardware(fleet, clock):
    fleet.inject(NODE, 0, "xid", code=79)
    fleet.inject(NODE, 0, "dbe", count=2)
    fleet.inject(NODE, 0, "row_remap_pending")
    fleet.inject(NODE, 0, "rate", metric="DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", per_second=5)
    fleet.inject(NODE, 1, "row_remap_failed")
    fleet.inject(NODE, 2, "gpu_lost", survives_reboot=True)
    fleet.inject(NODE, 3, "gpu_lost")
    clock.now += 60
    energy = value(fleet, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
    fleet.reboot(NODE, down_s=20)
    assert fleet.scrape(NODE)[0] == 503
    clock.now += 20
    for name in ("XID_ERRORS", "ECC_DBE_VOL_TOTAL", "ECC_SBE_VOL_TOTAL", "ROW_REMAP_PENDING"):
        assert value(fleet, f"DCGM_FI_DEV_{name}") == 0
    assert 0 < value(fleet, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION") < energy / 1000
    assert value(fleet, "DCGM_FI_DEV_ROW_REMAP_FAILURE", 1) == 1
    assert {row["gpu"] for _, row, _ in samples(page(fleet))} == set("0134567")
    assert "xid=" not in page(fleet)


def test_an_xid_of_broken_hardware_is_seen_anew_after_the_reboot(fleet, clock):
    (fault,) = fleet.inject(NODE, 0, "xid", code=79, survives_reboot=True)
    clock.now += 1000
    assert "xid=" not in page(fleet)
    fleet.reboot(NODE, down_s=10)
    clock.now += 10
    assert value(fleet, "DCGM_FI_DEV_XID_ERRORS") == 79
    assert samples(page(fleet), "DCGM_EXP_XID_ERRORS_COUNT", xid="79", gpu="0")
    fleet.lift(fault)
    assert value(fleet, "DCGM_FI_DEV_XID_ERRORS") == 0


def test_a_fault_in_the_past_is_in_the_history_from_its_time_on(fleet, clock):
    fleet.inject(NODE, 0, "temperature", celsius=97, at=clock.now - 45)
    hot = [
        line
        for line in fleet.history(clock.now - 90, clock.now, 30)
        if line.startswith('DCGM_FI_DEV_GPU_TEMP{gpu="0"')
    ]
    assert [line.split("} ")[1].split()[0] == "97" for line in hot] == [False, False, True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", 0, "dbe", {}), "no node 'nowhere'"),
        ((NODE, 8, "dbe", {}), "no GPU 8"),
        ((NODE, 0, "meltdown", {}), "meltdown"),
        ((NODE, 0, "xid", {}), "needs the parameter 'code'"),
        ((NODE, 0, "dbe", {"code": 1}), "takes no parameter 'code'"),
        ((NODE, 0, "frozen", {}), "give gpu None"),
        ((NODE, 0, "set", {"metric": "nvidia_smi", "value": 1}), "not simulated"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_with_its_reason(fleet, arguments, message):
    node, gpu, kind, params = arguments
    with pytest.raises(ValueError, match=message):
        fleet.inject(node, gpu, kind, **params)


# --- nodes


def test_a_node_that_comes_back_under_its_name_has_other_gpus(fleet):
    before = fleet.uuids(NODE)
    fleet.remove_node(NODE)
    assert fleet.scrape(NODE)[0] == 404
    fleet.add_node(NODE)
    assert set(fleet.uuids(NODE)).isdisjoint(before)


def test_a_swapped_gpu_has_another_uuid_and_no_faults(fleet):
    before = fleet.uuids(NODE)
    fleet.inject(NODE, 3, "row_remap_failed")
    new = fleet.swap_gpu(NODE, 3)
    assert new == fleet.uuids(NODE)[3] != before[3]
    assert fleet.uuids(NODE)[:3] == before[:3]
    assert value(fleet, "DCGM_FI_DEV_ROW_REMAP_FAILURE", 3) == 0


def test_nodes_that_cannot_be_are_refused(fleet):
    with pytest.raises(ValueError, match="already"):
        fleet.add_node(NODE)
    with pytest.raises(ValueError, match="unknown instance type"):
        fleet.add_node("other", "x9.metal")


def test_addresses_come_from_the_name_or_are_distinct(fleet):
    for number in range(600):
        fleet.add_node(f"node-{number}", "g5.xlarge")
    addresses = [target.address for target in fleet.targets()]
    assert addresses[0] == "10.0.1.5:9400"
    assert len(set(addresses)) == 601


def test_discovery_lists_each_group_apart_and_pages_are_served_by_path(fleet, clock):
    other = GpuFleet("lab", clock=clock)
    other.add_node(NODE, "g5.xlarge")
    client = Client(ExporterApp({"ws-1": [fleet], "ws-2": [fleet, other]}))
    assert len(client.get("/sd/ws-1").json) == 1
    listed = client.get("/sd/ws-2").json
    assert [entry["labels"]["cluster"] for entry in listed] == ["prod", "lab"]
    assert json.dumps(listed).count("10.0.1.5:9400") == 2
    answer = client.get(listed[1]["labels"]["__metrics_path__"])
    assert answer.status_code == 200
    assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert 'modelName="NVIDIA A10G"' in answer.text
    for path in ("/sd/ws-9", "/fleets/9/nodes/x/metrics", "/fleets/0/nodes/x/metrics", "/"):
        assert client.get(path).status_code == 404


def test_250_nodes_of_8_gpus_are_rendered_in_well_under_a_second(clock):
    fleet = GpuFleet(clock=clock)
    for number in range(250):
        fleet.add_node(f"node-{number}", pod=Pod("train", "job"))
    names = fleet.node_names()
    for name in names:
        fleet.scrape(name)
    clock.now += 1
    started = time.process_time()
    lines = sum(fleet.scrape(name)[1].count("\n") for name in names)
    assert lines > 250 * 8 * 20
    assert time.process_time() - started < 0.5


def test_scrapes_faults_and_changes_of_nodes_may_come_from_many_threads(fleet):
    failures = []
    stop = threading.Event()

    def scrape():
        while not stop.is_set():
            for name in fleet.node_names():
                status, text = fleet.scrape(name)
                if status == 200 and len(samples(text, "DCGM_FI_DEV_GPU_TEMP")) not in (7, 8):
                    failures.append(text)

    threads = [threading.Thread(target=scrape) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(20):
        fleet.add_node(f"node-{number}")
        fleet.inject(f"node-{number}", 1, "gpu_lost")
        fleet.assign(NODE, [2], None if number % 2 else Pod("a", f"b{number}"))
        fleet.clear(f"node-{number}")
        fleet.remove_node(f"node-{number}")
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
