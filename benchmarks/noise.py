"""What healthy GPU nodes look like in their metrics on an ordinary day: the noise, kind by kind.

Every generator tells what happens, how often, and who has reported it. An *episode* is one node's
part in it: its series from before the event until nothing of it can be in any rule's window any
more. Between its episodes a node is plain healthy.

The numbers are for 2,000 nodes of 8 GPUs and scale with the fleet. Everything is seeded.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.promql import SCRAPE_S, Database, Run, Series, Value, labels_of
from nodemend.domain.nodes import Readiness
from tests.unit.application.stage import node_name

GPUS = 8
DAY_S = 86_400
LONG_AGO = -100_000
"""Sample number before which nothing is asked: a window, and its offset, before the day begins."""
FOR_EVER = 1_000_000

LEAD_S = 120
TAIL_S = 2400
"""An episode is looked at this long before and after: longer than any rule's window or offset."""

BLANKS = (2147483632.0, 2147483634.0, 9.223372036854776e18, 140737488355328.0)
"""DCGM's blanks for integers of both sizes and for doubles (NVIDIA/go-dcgm const.go)."""

HOT = 90.0
"""From here on a GPU is too hot, unless it tells its own limit (rule gpu-temperature)."""
SLOWDOWN = 89.0
"""Of A100 and H100, as nvidia-smi shows it."""

APPLICATION_XIDS = (13, 13, 31, 31, 31, 43)
"""Codes that user code raises (NVIDIA's XID catalogue: restart the application, or ignore)."""
STICKY_FATAL_XIDS = (48, 79, 95, 119)

OfGpu = Callable[[int, int], float]
"""A value by GPU and number of the sample."""


def jitter(gpu: int, number: int) -> float:
    """Return 0 to 4, the same for the same sample."""
    return float((number * 7919 + gpu * 104_729) % 5)


def busy_temp(gpu: int, number: int) -> float:
    """Return the temperature of a working GPU: 64 to 82 degrees."""
    return 64 + gpu * 2 + jitter(gpu, number)


def idle_temp(gpu: int, number: int) -> float:
    """Return the temperature of an idle GPU: 31 to 42 degrees."""
    return 31 + gpu + jitter(gpu, number)


def busy_util(gpu: int, number: int) -> float:
    """Return the utilization of a working GPU, with the dips of its checkpoints."""
    return 0.0 if number % 40 == gpu else 96 + jitter(gpu, number)


def no_util(_gpu: int, _number: int) -> float:
    """Return the utilization of a GPU that does nothing."""
    return 0.0


@dataclass
class Machine:
    """One node of the fleet: who it is, and how its exporter prints."""

    number: int
    seed: int
    is_renamed: bool
    """Its exporter prints `hostname` and DCGM 4.6's names."""
    has_codes: bool
    """Its exporter prints `err_code` (since 3.3.6)."""
    has_limit: bool
    """Its counters file lists the slowdown temperature."""
    xids: dict[int, int] = field(default_factory=dict)
    """The last XID of each GPU, which the gauge holds on to."""
    boots: int = 1
    free_at: int = 0
    """When its last episode is over."""

    @property
    def name(self) -> str:
        """The node's name."""
        return node_name(self.number)

    @property
    def phase_s(self) -> int:
        """When within each 30 s it is scraped."""
        return self.number % SCRAPE_S

    def sample(self, t: int) -> int:
        """Return the number of its first sample at or after a time."""
        return -((self.phase_s - t) // SCRAPE_S)


@dataclass(frozen=True)
class Era:
    """A stretch in which a node's series have the same labels."""

    start: int
    end: int
    """Numbers of samples; the end is not included."""
    pod: str = ""
    exporter: int = 1
    """The exporter's pod: a new one has another address and another name."""
    is_renamed: bool = False
    is_marked: bool = True
    """Whether stale marks are written when the series end."""
    xids: Mapping[int, int] = field(default_factory=dict)
    counts: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Code and number of hits in the exporter's window of five minutes, by GPU."""
    temp: OfGpu = busy_temp
    util: OfGpu = busy_util
    hidden: frozenset[int] = frozenset()
    """GPUs without any row."""
    blanks: Mapping[int, float] = field(default_factory=dict)
    """GPUs all of whose values are a blank."""
    mig: tuple[str, ...] = ()
    """Instances into which GPU 0 is cut: its rows are printed once for each."""
    shift: int = 0
    """The index of GPU 0: GPUs may be numbered anew by a boot."""


def series_of(machine: Machine, eras: list[Era]) -> list[Series]:
    """Return all series of a node; equal labels in several eras are one series."""
    runs: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for era in eras:
        if era.start >= era.end:
            continue
        for name, labels, value in _rows(machine, era):
            run = Run(era.start, era.end - 1, value, era.is_marked)
            runs.setdefault(labels_of(name, labels), []).append(run)
    return [Series(labels, tuple(found), machine.phase_s) for labels, found in runs.items()]


def uuid(machine: Machine, gpu: int) -> str:
    """Return a GPU's UUID; the card keeps it whatever its index."""
    return f"GPU-{machine.number}-{gpu}"


def _rows(machine: Machine, era: Era) -> Iterator[tuple[str, dict[str, str], Value]]:
    for gpu in range(GPUS):
        if gpu in era.hidden:
            continue
        index = str((gpu + era.shift) % GPUS)
        common = {
            "UUID": uuid(machine, gpu),
            "gpu": index,
            "device": f"nvidia{index}",
            "modelName": "NVIDIA H100 80GB HBM3",
            "hostname" if era.is_renamed else "Hostname": machine.name,
            "instance": f"10.0.{era.exporter}.{machine.number % 250}:9400",
            "pod": f"dcgm-exporter-{machine.number}-{era.exporter}",
            "namespace": "gpu-operator",
        }
        if era.pod:
            job = {"exported_pod": f"{era.pod}-{machine.number}", "exported_namespace": "ml"}
            common |= job | {"exported_container": "main"}
        parts = era.mig if gpu == 0 else ()
        for instance in parts or ("",):
            labels = common | ({"GPU_I_ID": instance, "GPU_I_PROFILE": "1g.10gb"} if parts else {})
            yield from _gpu_rows(machine, era, gpu, labels, is_mig=bool(parts))


def _gpu_rows(
    machine: Machine, era: Era, gpu: int, labels: dict[str, str], *, is_mig: bool
) -> Iterator[tuple[str, dict[str, str], Value]]:
    is_new = era.is_renamed
    code = era.xids.get(gpu, 0)
    known = {"err_code": str(code), "err_msg": f"Xid {code}"} if machine.has_codes else {}
    blank = era.blanks.get(gpu)

    def value(measured: Value) -> Value:
        return measured if blank is None else blank

    xid = "DCGM_FI_DEV_XID_ERROR" if is_new else "DCGM_FI_DEV_XID_ERRORS"
    yield xid, labels | known, value(float(code))
    hits = era.counts.get(gpu)
    window = {"window_size_in_ms": "300000"} | ({"xid": str(hits[0])} if hits else {})
    yield "DCGM_EXP_XID_ERRORS_COUNT", labels | window, float(hits[1]) if hits else 0.0
    temp = "DCGM_FI_DEV_GPU_TEMP_CELSIUS" if is_new else "DCGM_FI_DEV_GPU_TEMP"
    yield temp, labels, value(lambda number: era.temp(gpu, number))
    if machine.has_limit:
        limit = "DCGM_FI_DEV_GPU_TEMP_SLOWDOWN_CELSIUS" if is_new else "DCGM_FI_DEV_SLOWDOWN_TEMP"
        yield limit, labels, SLOWDOWN
    yield "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", labels, value(0.0)
    if not is_mig:  # of a GPU that is cut these have no row at all (case D45)
        remap = "DCGM_FI_DEV_ROW_REMAP_FAILED" if is_new else "DCGM_FI_DEV_ROW_REMAP_FAILURE"
        yield remap, labels, value(0.0)
        util = "DCGM_FI_DEV_GPU_UTIL_RATIO" if is_new else "DCGM_FI_DEV_GPU_UTIL"
        yield util, labels, value(lambda number: era.util(gpu, number))


# --- episodes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What somebody else does to the Node object, or an alert that is sent."""

    at_s: int
    what: str
    """`cordon`, `uncordon`, `not_ready`, `ready`, `boot` or `alert`."""
    gpu: int = 0
    code: int = 0
    """What an alert is about."""

    @property
    def readiness(self) -> Readiness:
        """The condition that the change leaves."""
        return Readiness.UNKNOWN if self.what == "not_ready" else Readiness.READY


@dataclass(frozen=True)
class Episode:
    """One node's part in an event."""

    kind: str
    machine: Machine
    at_s: int
    end_s: int
    eras: list[Era]
    changes: tuple[Change, ...] = ()

    @property
    def from_s(self) -> int:
        """When it is looked at first."""
        return self.at_s - LEAD_S

    @property
    def until_s(self) -> int:
        """When nothing of it is in any window any more."""
        return self.end_s + TAIL_S

    def database(self) -> Database:
        """Return the node's series."""
        return Database(series_of(self.machine, self.eras))


Eras = tuple[list[Era], int]
"""What a node prints, and when (seconds) it is plain healthy again."""


def steady(machine: Machine) -> Era:
    """Return the era of a node that works, and on which nothing happens."""
    return Era(
        LONG_AGO,
        FOR_EVER,
        pod="train",
        is_renamed=machine.is_renamed,
        xids=dict(machine.xids),
    )


def cut(era: Era, *at: int, **changes: object) -> list[Era]:
    """Split an era at sample numbers; the changes hold in the second of two, or of three, parts."""
    first, second = at[0], at[1] if len(at) > 1 else era.end
    middle = replace(era, start=first, end=second, **changes)  # type: ignore[arg-type]
    return [replace(era, end=first), middle, replace(era, start=second)]


def job_start(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """A job ends and another begins: new labels, no work for minutes, then the first hot samples.

    Its images are pulled and its checkpoint is read: 2 to 25 minutes of allocated idle GPUs. The
    counters and the sticky XID go on under other labels (dcgm-exporter's `pod` labels; facts 1.5.7,
    prometheus 1673), and one sample overshoots before the fans follow.
    """
    old = steady(machine)
    start = machine.sample(at_s)
    works = start + rng.randint(4, 50)

    def temp(gpu: int, number: int) -> float:
        if number < works:
            return idle_temp(gpu, number)
        return 93.0 if number == works + 2 else busy_temp(gpu, number)

    new = replace(
        old,
        start=start + rng.randint(1, 4),
        pod=f"job-{at_s}",
        temp=temp,
        util=lambda gpu, number: busy_util(gpu, number) if number >= works else 0.0,
    )
    gap = replace(old, start=start, end=new.start, pod="", temp=idle_temp, util=no_util)
    return [replace(old, end=start), gap, new], (works + 3) * SCRAPE_S


def idle_notebook(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """A person holds GPUs and does nothing with them for an hour or two."""
    start = machine.sample(at_s)
    end = start + rng.randint(120, 240)
    eras = cut(steady(machine), start, end, pod="notebook", temp=idle_temp, util=no_util)
    return eras, end * SCRAPE_S


def _xid_eras(machine: Machine, start: int, hits: Mapping[int, tuple[int, int]]) -> list[Era]:
    """The gauge takes the code and keeps it; the window count shows it for five minutes."""
    old = steady(machine)
    xids = {**old.xids, **{gpu: code for gpu, (code, _) in hits.items()}}
    machine.xids.update(xids)
    fresh = replace(old, start=start, end=start + 10, xids=xids, counts=hits)
    return [replace(old, end=start), fresh, replace(old, start=start + 10, xids=xids)]


def user_code_xid(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """User code reads out of bounds: XID 13, 31 or 43 on one or all of its GPUs, once or often.

    In NVIDIA's catalogue these are the application's; dcgm-exporter 500 shows how they stay.
    """
    gpus = range(GPUS) if rng.random() < 0.3 else [rng.randrange(GPUS)]
    code = rng.choice(APPLICATION_XIDS)
    start = machine.sample(at_s)
    eras = _xid_eras(machine, start, {gpu: (code, rng.randint(1, 40)) for gpu in gpus})
    return eras, at_s + 900


def job_crash(machine: Machine, at_s: int, _rng: random.Random) -> Eras:
    """A job of 77 nodes crashes: XID 45 on every GPU in the same minute (NVSentinel 1629)."""
    hits = dict.fromkeys(range(GPUS), (45, 1))
    return _xid_eras(machine, machine.sample(at_s), hits), at_s + 900


def row_remap(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """A memory row was remapped: XID 63, as designed; the catalogue says to ignore it."""
    hits = {rng.randrange(GPUS): (63, 1)}
    return _xid_eras(machine, machine.sample(at_s), hits), at_s + 900


def exporter_restart(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """The exporter restarts: a gap of one to four minutes, another pod name and address.

    With an embedded host engine the gauge begins at 0 again; a standalone one keeps the last XID
    (dcgm-exporter 500, DCGM 277).
    """
    old = steady(machine)
    start = machine.sample(at_s)
    back = start + rng.randint(2, 8)
    if rng.random() < 0.5:
        machine.xids.clear()
    new = replace(old, start=back, exporter=2, xids=dict(machine.xids))
    return [replace(old, end=start), new], back * SCRAPE_S


def exporter_upgrade(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """A DaemonSet rolls out an exporter that renames labels and metrics, node by node.

    `Hostname` became `hostname` in May 2026 (dcgm-exporter 655), DCGM 4.6 renamed the fields; the
    standalone host engine stays, and with it the last XIDs.
    """
    old = steady(machine)
    start = machine.sample(at_s)
    back = start + rng.randint(1, 4)
    machine.is_renamed = True
    return [replace(old, end=start), replace(steady(machine), start=back, exporter=3)], (
        back * SCRAPE_S
    )


def node_upgrade(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """Somebody upgrades the operating system: cordon, reboot, 6 to 10 minutes of nothing.

    The boot id changes, the last XIDs are gone, GPUs may be numbered anew (facts 1.1).
    """
    old = steady(machine)
    start = machine.sample(at_s)
    back = start + rng.randint(12, 20)
    machine.xids.clear()
    new = replace(steady(machine), start=back, exporter=4, shift=rng.randrange(GPUS), pod="")
    idle = replace(new, end=back + 20, temp=idle_temp, util=no_util)
    return [replace(old, end=start), idle, replace(new, start=back + 20, pod="train-2")], (
        (back + 20) * SCRAPE_S
    )


def mig_rows(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """GPU 0 is cut into instances: a reset, and every row of it is printed once for each of them.

    Utilization and remap rows have none (dcgm-exporter 353 and 50, case D45). User code raises XID
    31 in one instance: the row of each shows it.
    """
    old = steady(machine)
    start = machine.sample(at_s)
    back = start + rng.randint(2, 5)
    crash = back + rng.randint(10, 40)
    parts = ("7", "8", "9", "10", "11", "12", "13")[: rng.randint(2, 7)]
    machine.xids.pop(0, None)
    new = replace(steady(machine), start=back, end=crash, exporter=5, mig=parts)
    xids = {**new.xids, 0: 31}
    fresh = replace(new, start=crash, end=crash + 10, xids=xids, counts={0: (31, 1)})
    late = replace(new, start=crash + 10, end=crash + 60, xids=xids)
    whole = replace(steady(machine), start=crash + 63, exporter=6)
    return [replace(old, end=start), new, fresh, late, whole], (crash + 63) * SCRAPE_S


def scrape_gap(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """A node's scrapes fail for one to six rounds: stale marks, then all is as before."""
    start = machine.sample(at_s)
    return _gap(machine, start, start + rng.randint(1, 6))


def _gap(machine: Machine, start: int, end: int, *, is_marked: bool = True) -> Eras:
    old = replace(steady(machine), is_marked=is_marked)
    return [replace(old, end=start), replace(old, start=end)], end * SCRAPE_S


def missing_rows(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """One GPU's rows are missing for one or two scrapes: a read timed out, values were dropped."""
    start = machine.sample(at_s)
    end = start + rng.randint(1, 2)
    gpus = frozenset({rng.randrange(GPUS)})
    return cut(steady(machine), start, end, hidden=gpus), end * SCRAPE_S


def ingestion_outage(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """A zone's collector cannot write for a quarter of an hour: gaps without any stale mark."""
    start = machine.sample(at_s)
    return _gap(machine, start, start + 30 + rng.randint(0, 3), is_marked=False)


def frozen_exporter(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """The exporter serves the same numbers for half an hour, some of them 0 (dcgm-exporter 164)."""
    start = machine.sample(at_s)
    end = start + rng.randint(60, 90)
    eras = cut(steady(machine), start, end, temp=lambda _gpu, _n: 71.0, util=no_util)
    return eras, end * SCRAPE_S


def blank_values(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """Every value of some GPUs is a blank of DCGM's for ten minutes (gpu-monitoring-tools 97)."""
    start = machine.sample(at_s)
    end = start + 20
    gpus = rng.sample(range(GPUS), rng.choice((1, 2, GPUS)))
    blanks = {gpu: rng.choice(BLANKS) for gpu in gpus}
    return cut(steady(machine), start, end, blanks=blanks), end * SCRAPE_S


def hot_moment(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """A GPU is at 92 degrees for up to four minutes: a burst of work, no fault (DCGM 270)."""
    return _hot(machine, at_s, rng, minutes=rng.uniform(1, 4))


def cooling_dip(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """The room is too warm for nine to twelve minutes: long enough to be found, not to be a fault.

    A degraded fault must last for its hold time of ten minutes, counted from the first finding,
    which comes after five minutes of heat.
    """
    return _hot(machine, at_s, rng, minutes=rng.uniform(9, 12))


def _hot(machine: Machine, at_s: int, rng: random.Random, *, minutes: float) -> Eras:
    start = machine.sample(at_s)
    end = start + int(minutes * 60 / SCRAPE_S)
    hot = frozenset(rng.sample(range(GPUS), rng.randint(1, 4)))
    eras = cut(
        steady(machine),
        start,
        end,
        temp=lambda gpu, n: HOT + 2 if gpu in hot else busy_temp(gpu, n),
    )
    return eras, end * SCRAPE_S


def time_slicing(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """With time slicing or DRA on, the idle GPUs' rows vanish once one is allocated.

    Fixed in the exporter of autumn 2025, and still deployed (dcgm-exporter 569, 554, 570).
    """
    start = machine.sample(at_s)
    end = start + rng.randint(40, 80)
    taken = frozenset(rng.sample(range(GPUS), rng.choice((1, 2, 4))))
    idle = frozenset(range(GPUS)) - taken
    old = replace(steady(machine), pod="", temp=idle_temp, util=no_util)
    eras = cut(old, start, end, pod="slice", hidden=idle, temp=busy_temp, util=busy_util)
    return eras, end * SCRAPE_S


def sticky_alert(machine: Machine, at_s: int, rng: random.Random) -> Eras:
    """The users' own rule `DCGM_FI_DEV_XID_ERRORS > 0` fires for days for what was repaired.

    The GPU was reset by hand, and the gauge keeps the fatal code (dcgm-exporter 190 and 500).
    """
    machine.xids[rng.randrange(GPUS)] = rng.choice(STICKY_FATAL_XIDS)
    return [steady(machine)], at_s + 300


def network_blip(machine: Machine, at_s: int, _rng: random.Random) -> Eras:
    """A node's kubelet is not heard for two minutes; its metrics go on."""
    return [steady(machine)], at_s + 240


def plain(machine: Machine, at_s: int, _rng: random.Random) -> Eras:
    """Nothing happens: each node is looked at so once in the day, for one scan of each family."""
    return [steady(machine)], at_s + 300 - TAIL_S


@dataclass(frozen=True)
class Kind:
    """How often something happens, and to how many nodes at once."""

    make: Callable[[Machine, int, random.Random], Eras]
    nodes: int
    """In a day, on 2,000 nodes."""
    at_once: int = 1
    spread_s: int = 0
    """How long one event takes to reach all its nodes."""
    changes: Callable[[Machine, int, int], tuple[Change, ...]] = lambda _machine, _at, _end: ()
    is_answered: bool = False
    """Rules must see it: a day in which they do not has proven nothing."""

    @property
    def name(self) -> str:
        """The kind's name, for people."""
        return self.make.__name__.replace("_", " ")


def _blip(_machine: Machine, at_s: int, _end_s: int) -> tuple[Change, ...]:
    return Change(at_s, "not_ready"), Change(at_s + 120, "ready")


def _upgrade(_machine: Machine, at_s: int, end_s: int) -> tuple[Change, ...]:
    ready = end_s - 20 * SCRAPE_S
    return (
        Change(at_s - 60, "cordon"),
        Change(at_s + 60, "not_ready"),
        Change(ready, "boot"),
        Change(ready + 120, "uncordon"),
    )


def _alert(machine: Machine, at_s: int, _end_s: int) -> tuple[Change, ...]:
    """The alert, a copy of it, and the alert manager's repeat."""
    gpu, code = next(reversed(machine.xids.items()))
    return tuple(Change(at, "alert", gpu, code) for at in (at_s, at_s + 20, at_s + 300))


KINDS: tuple[Kind, ...] = (
    Kind(job_crash, 77, at_once=77, is_answered=True),
    Kind(ingestion_outage, 200, at_once=200, spread_s=20),
    Kind(exporter_upgrade, 300, at_once=300, spread_s=1800),
    Kind(node_upgrade, 40, at_once=40, spread_s=14_400, changes=_upgrade),
    Kind(job_start, 600, at_once=100, spread_s=60),
    Kind(user_code_xid, 150, is_answered=True),
    Kind(idle_notebook, 20, is_answered=True),
    Kind(row_remap, 6, is_answered=True),
    Kind(exporter_restart, 80),
    Kind(mig_rows, 40, is_answered=True),
    Kind(scrape_gap, 200),
    Kind(missing_rows, 100),
    Kind(frozen_exporter, 10),
    Kind(blank_values, 40),
    Kind(hot_moment, 40),
    Kind(cooling_dip, 10, is_answered=True),
    Kind(time_slicing, 20),
    Kind(sticky_alert, 60, changes=_alert),
    Kind(network_blip, 30, changes=_blip),
    Kind(plain, 2000),
)


def fleet(nodes: int, rng: random.Random) -> list[Machine]:
    """Return the machines: exporters of all ages, and XIDs of the past in many gauges."""
    machines = []
    for number in range(1, nodes + 1):
        codes = APPLICATION_XIDS if rng.random() < 0.9 else STICKY_FATAL_XIDS
        xids = {rng.randrange(GPUS): rng.choice(codes)} if rng.random() < 0.3 else {}
        machines.append(
            Machine(
                number,
                seed=rng.randrange(2**32),
                is_renamed=rng.random() < 0.3,
                has_codes=rng.random() < 0.9,
                has_limit=rng.random() < 0.5,
                xids=xids,
            )
        )
    return machines


def day(machines: list[Machine], rng: random.Random, length_s: int = DAY_S) -> list[Episode]:
    """Return the day's episodes in the order of time; no node is in two at once.

    Args:
        machines: The fleet; their state moves on as the day does.
        rng: What decides.
        length_s: Of the day; what happens in it does not become less if it is short.

    Raises:
        ValueError: if the fleet is too small to find a node that is free.
    """
    wanted: list[tuple[int, Kind, int]] = []
    for kind in KINDS:
        nodes = max(2, round(kind.nodes * len(machines) / 2000))
        at_once = max(1, round(kind.at_once * len(machines) / 2000)) if kind.at_once > 1 else 1
        for first in range(0, nodes, at_once):
            count = min(at_once, nodes - first)
            step_s = kind.spread_s / kind.at_once
            last_s = length_s - 3600 - int(count * step_s)
            at_s = rng.randrange(600, last_s)
            wanted += [(at_s + int(number * step_s), kind, number) for number in range(count)]
    wanted.sort(key=lambda one: (one[0], one[1].name, one[2]))
    episodes = []
    for at_s, kind, _ in wanted:
        machine = _free(machines, at_s, rng, plain_only=kind.make is plain)
        own = random.Random(f"{machine.seed}/{at_s}/{kind.name}")
        eras, end_s = kind.make(machine, at_s, own)
        changes = kind.changes(machine, at_s, end_s)
        episode = Episode(kind.name, machine, at_s, end_s, eras, changes)
        machine.free_at = episode.until_s + LEAD_S
        episodes.append(episode)
    return sorted(episodes, key=lambda one: (one.from_s, one.machine.number))


def _free(machines: list[Machine], at_s: int, rng: random.Random, *, plain_only: bool) -> Machine:
    """Return a node that is in no episode; for the plain ones in turn, so that all get theirs."""
    if plain_only:
        machines.append(machines.pop(0))
    for _ in range(10 * len(machines)):
        machine = machines[-1] if plain_only else rng.choice(machines)
        if machine.free_at <= at_s - LEAD_S:
            return machine
        if plain_only:
            machines.append(machines.pop(0))
    raise ValueError(f"{len(machines)} nodes are too few for this day")
