"""What a simulated GPU does: its values as a function of the time, and what is wrong with it.

Nothing here is stored from one scrape to the next. A value follows from the seed, the time, the pod
and the faults in force then, so that the past can be written with the same code that is scraped.
"""

import bisect
import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from local.amp.gpus import METRICS_BY_NAME, RENAMED, XID_ERRORS, GpuModel

UPTIME_S = 30 * 86400.0
"""Age of the counters when a model starts."""
_TURN = 2 * math.pi
_WAVE_S = 40.0
"""Period of the swing of a busy GPU's power."""
_SWING = 0.03

Value = float | int | None
"""None: there is no such series."""


class FaultKind(StrEnum):
    """What can be wrong with a GPU, or (where the GPU is None) with a node's exporter."""

    XID = "xid"
    """An XID. The gauge keeps it until it is cleared or the node reboots; the window count shows it
    for 300 s. Inject it again for another occurrence. Parameters: `code`, `count` = 1."""
    DBE = "dbe"
    """Double-bit ECC errors: `count` = 1."""
    SBE = "sbe"
    """Single-bit ECC errors: `count` = 1 (see `rate` for a trend)."""
    ROW_REMAP_FAILED = "row_remap_failed"
    """ROW_REMAP_FAILURE is 1. It stands in the InfoROM, so it survives a reboot."""
    ROW_REMAP_PENDING = "row_remap_pending"
    """ROW_REMAP_PENDING is 1 until a reboot."""
    GPU_LOST = "gpu_lost"
    """All series of the GPU vanish."""
    TEMPERATURE = "temperature"
    """GPU at `celsius`; memory at `memory_celsius` (default: as it was)."""
    IDLE = "idle"
    """A pod holds the GPU and does nothing with it."""
    HANG = "hang"
    """Utilization says 100, but no pipe works and the power falls."""
    STRAGGLER = "straggler"
    """Clock, power and pipes at `factor` = 0.6 of what the others do."""
    CLOCK_REASONS = "clock_reasons"
    """These bits of `mask` are set; the violation counters run where the bit has one. `sm_clock`
    in MHz (default: half)."""
    RECOVERY_ACTION = "recovery_action"
    """The driver asks for `action` (1 reset, 2 reboot, 3 drain peers, 4 drain and reset)."""
    SET = "set"
    """`metric` reads `value`; None takes the series away."""
    RATE = "rate"
    """Counter `metric` grows by `per_second` more; it keeps its height when this is cleared."""
    EXPORTER_DOWN = "exporter_down"
    """The node's exporter answers with `status` = 503, so that `up` is 0."""
    FROZEN = "frozen"
    """The exporter repeats what it said at the start of the fault, bit by bit."""


_REQUIRED: Any = object()
_PARAMETERS: Mapping[FaultKind, Mapping[str, Any]] = {
    FaultKind.XID: {"code": _REQUIRED, "count": 1},
    FaultKind.DBE: {"count": 1},
    FaultKind.SBE: {"count": 1},
    FaultKind.ROW_REMAP_FAILED: {},
    FaultKind.ROW_REMAP_PENDING: {},
    FaultKind.GPU_LOST: {},
    FaultKind.TEMPERATURE: {"celsius": _REQUIRED, "memory_celsius": None},
    FaultKind.IDLE: {},
    FaultKind.HANG: {},
    FaultKind.STRAGGLER: {"factor": 0.6},
    FaultKind.CLOCK_REASONS: {"mask": _REQUIRED, "sm_clock": None},
    FaultKind.RECOVERY_ACTION: {"action": _REQUIRED},
    FaultKind.SET: {"metric": _REQUIRED, "value": _REQUIRED},
    FaultKind.RATE: {"metric": _REQUIRED, "per_second": _REQUIRED},
    FaultKind.EXPORTER_DOWN: {"status": 503},
    FaultKind.FROZEN: {},
}
NODE_WIDE = frozenset({FaultKind.EXPORTER_DOWN, FaultKind.FROZEN})
_STOPS_WORK = frozenset({FaultKind.IDLE, FaultKind.HANG})
_COUNTS_ON = frozenset({FaultKind.RATE, FaultKind.CLOCK_REASONS})
"""Counters keep what these added after they ended, until the driver is loaded again."""


@dataclass(slots=True)
class Fault:
    """A fault in force from `since` until `until`; made by `GpuFleet.inject`."""

    node: str
    gpu: int | None
    kind: FaultKind
    params: Mapping[str, Any]
    since: float
    until: float
    survives_reboot: bool

    def is_active(self, at: float) -> bool:
        """Tell whether the fault is in force at a time."""
        return self.since <= at < self.until


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod that holds a GPU."""

    namespace: str
    name: str
    container: str = "main"


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A part of a GPU."""

    profile: str
    """Such as `2g.20gb`."""
    id: int


@dataclass(frozen=True, slots=True)
class _Work:
    """A stretch in which a GPU works, or does not."""

    since: float
    energy_j: float
    """Until then, like `busy_s`."""
    busy_s: float
    works: bool


class Gpu:
    """One physical GPU and its timeline.

    Its values at a time follow from `faults` and from the pods that held it; call `integrate` after
    the end of a fault that keeps it from working was moved.
    """

    def __init__(
        self,
        index: int,
        uuid: str,
        model: GpuModel,
        *,
        pod: Pod | None,
        mig: tuple[MigInstance, ...],
        dice: random.Random,
        born: float,
    ) -> None:
        self.index = index
        self.uuid = uuid
        self.model = model
        self.pod = pod
        self.mig = mig
        self.phase = dice.uniform(0, _TURN)
        self.lean = dice.uniform(-1, 1)
        """-1…1: how this GPU differs from its siblings."""
        self.faults: list[Fault] = []
        self._pod_changes = [(-math.inf, pod is not None)]
        self._counted_from = born - UPTIME_S
        self._reboots: list[float] = []
        self._work: list[_Work] = []
        self.integrate()

    def hold(self, pod: Pod | None, at: float) -> None:
        """Give the GPU to a pod from a time on, or free it."""
        if (self.pod is None) is not (pod is None):
            self._pod_changes.append((at, pod is not None))
            self.integrate()
        self.pod = pod

    def add(self, fault: Fault) -> None:
        """Put a fault on the timeline."""
        self.faults.append(fault)
        self.faults.sort(key=lambda known: known.since)
        if fault.kind in _STOPS_WORK:
            self.integrate()

    def reboot(self, at: float) -> None:
        """Start the driver's counters again; what it does to the faults is the fleet's matter."""
        self._reboots.append(at)
        kept = [f for f in self.faults if f.kind not in _COUNTS_ON or f.survives_reboot]
        self.faults = sorted(kept, key=lambda fault: fault.since)

    def integrate(self) -> None:
        """Work out again how much energy and busy time there was at each change of work."""
        stops = [f for f in self.faults if f.kind in _STOPS_WORK]
        times = {at for at, _ in self._pod_changes if at > -math.inf}
        times |= {edge for f in stops for edge in (f.since, f.until) if edge < math.inf}
        last = _Work(self._counted_from, 0.0, 0.0, self._works(self._counted_from, stops))
        self._work = [last]
        for edge in sorted(times):
            if edge > last.since:
                energy_j, busy_s = self._grown(last, edge)
                last = _Work(edge, energy_j, busy_s, self._works(edge, stops))
                self._work.append(last)

    def values(self, now: float) -> dict[str, Value] | None:
        """Return every metric at a time, by its old name; None if the GPU is lost."""
        work = self._work_at(now)
        energy_j, busy_s = self._grown(work, now)
        reboot = max((at for at in self._reboots if at <= now), default=None)
        if reboot is not None:
            energy_then, busy_then = self._grown(self._work_at(reboot), reboot)
            energy_j, busy_s = energy_j - energy_then, busy_s - busy_then
        values = self._healthy(now, work.works, energy_j, busy_s)
        for fault in self.faults:
            if fault.since > now:
                break
            if fault.kind in _COUNTS_ON:
                _EFFECTS[fault.kind](values, fault, now)
            elif now < fault.until:
                if fault.kind is FaultKind.GPU_LOST:
                    return None
                _EFFECTS[fault.kind](values, fault, now)
        return values

    def xid_counts(self, now: float, window_s: float) -> dict[int, int]:
        """Return how often each XID was seen within the window that ends now."""
        counts: dict[int, int] = {}
        for fault in self.faults:
            is_xid = fault.kind is FaultKind.XID and fault.is_active(now)
            if is_xid and now - fault.since < window_s:
                code = int(fault.params["code"])
                counts[code] = counts.get(code, 0) + int(fault.params["count"])
        return counts

    def _works(self, at: float, stops: Collection[Fault]) -> bool:
        index = bisect.bisect_right([since for since, _ in self._pod_changes], at) - 1
        return self._pod_changes[index][1] and not any(fault.is_active(at) for fault in stops)

    def _work_at(self, at: float) -> "_Work":
        index = bisect.bisect_right(self._work, at, key=lambda work: work.since) - 1
        return self._work[max(index, 0)]

    def _mean_power_w(self, works: bool) -> float:
        model = self.model
        if works:
            return model.power_limit_w * (0.9 + 0.02 * self.lean)
        return float(model.idle_power_w)

    def _grown(self, work: "_Work", end: float) -> tuple[float, float]:
        """Return energy and busy time at `end`.

        The energy is the integral of the power that `_healthy` prints, so that the two never
        contradict each other.
        """
        mean_w = self._mean_power_w(work.works)
        rate = _TURN / _WAVE_S
        waves = math.cos(rate * work.since + self.phase) - math.cos(rate * end + self.phase)
        energy_j = mean_w * (end - work.since) + mean_w * _SWING / rate * waves
        return work.energy_j + energy_j, work.busy_s + (end - work.since) * work.works

    def _healthy(
        self,
        now: float,
        works: bool,
        energy_j: float,
        busy_s: float,
    ) -> dict[str, Value]:
        model, lean = self.model, self.lean
        wave = math.sin(_TURN * now / _WAVE_S + self.phase)
        slow = math.sin(_TURN * now / 900.0 + self.phase)
        power_w = self._mean_power_w(works) * (1 + _SWING * wave)
        temp = (model.busy_c if works else 32) + round(2 * slow + 2 * lean)
        is_held = works or self.pod is not None
        memory_used = int(model.memory_mib * (0.88 + 0.04 * lean)) if is_held else 4
        reserved = model.memory_mib // 100
        is_capped = works and wave > 0.6
        clock = model.max_sm_clock_mhz - (15 if is_capped else 0) if works else 345
        return {
            "DCGM_FI_DEV_SM_CLOCK": clock,
            "DCGM_FI_DEV_MEM_CLOCK": model.memory_clock_mhz,
            "DCGM_FI_DEV_MEMORY_TEMP": temp + 9 if model.has_memory_temp else 0,
            "DCGM_FI_DEV_GPU_TEMP": temp,
            "DCGM_FI_DEV_SLOWDOWN_TEMP": model.slowdown_c,
            "DCGM_FI_DEV_POWER_USAGE": power_w,
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": int(energy_j * 1000),
            "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": (4 if is_capped else 0) if works else 1,
            "DCGM_FI_DEV_POWER_VIOLATION": 0,
            "DCGM_FI_DEV_THERMAL_VIOLATION": 0,
            "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": int(abs(lean) * 3),
            "DCGM_FI_DEV_GPU_UTIL": round(97 + 2 * wave) if works else 0,
            "DCGM_FI_DEV_MEM_COPY_UTIL": round(52 + 4 * wave + 2 * lean) if works else 0,
            "DCGM_FI_DEV_ENC_UTIL": 0,
            "DCGM_FI_DEV_DEC_UTIL": 0,
            XID_ERRORS: 0,
            "DCGM_FI_DEV_FB_FREE": model.memory_mib - reserved - memory_used,
            "DCGM_FI_DEV_FB_USED": memory_used,
            "DCGM_FI_DEV_FB_RESERVED": reserved,
            "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": 0,
            "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 0,
            "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 0,
            "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": 0,
            "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0,
            "DCGM_FI_DEV_ROW_REMAP_PENDING": 0,
            "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION": 0,
            "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": 0,
            "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": 0,
            "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 0,
            "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": 0,
            "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": int(busy_s * 184_000),
            "DCGM_FI_DEV_FABRIC_MANAGER_STATUS": 3,
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.955 + 0.03 * wave if works else 0.0,
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.46 + 0.04 * wave + 0.01 * lean if works else 0.0,
            "DCGM_FI_PROF_DRAM_ACTIVE": 0.38 + 0.03 * wave + 0.01 * lean if works else 0.0,
        }


def checked_params(kind: FaultKind, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill in a kind's defaults; refuse parameters that it does not have or cannot do without."""
    allowed = _PARAMETERS[kind]
    unknown = sorted(set(params) - set(allowed))
    if unknown:
        raise ValueError(f"fault {kind.value!r} takes no parameter {unknown[0]!r}")
    checked = {**allowed, **params}
    missing = sorted(name for name, value in checked.items() if value is _REQUIRED)
    if missing:
        raise ValueError(f"fault {kind.value!r} needs the parameter {missing[0]!r}")
    metric = checked.get("metric")
    if metric is not None:
        canonical = RENAMED.get(metric, metric)
        if canonical not in METRICS_BY_NAME:
            raise ValueError(f"metric {metric!r} is not simulated")
        checked["metric"] = canonical
    return checked


Effect = Callable[[dict[str, Value], Fault, float], None]


def _set_xid(values: dict[str, Value], fault: Fault, _now: float) -> None:
    values[XID_ERRORS] = int(fault.params["code"])


def _set(metric: str, value: Value) -> Effect:
    def effect(values: dict[str, Value], _fault: Fault, _now: float) -> None:
        values[metric] = value

    return effect


def _add(metric: str) -> Effect:
    def effect(values: dict[str, Value], fault: Fault, _now: float) -> None:
        values[metric] = (values[metric] or 0) + int(fault.params["count"])

    return effect


def _heat(values: dict[str, Value], fault: Fault, _now: float) -> None:
    values["DCGM_FI_DEV_GPU_TEMP"] = fault.params["celsius"]
    if fault.params["memory_celsius"] is not None:
        values["DCGM_FI_DEV_MEMORY_TEMP"] = fault.params["memory_celsius"]


def _hang(values: dict[str, Value], _fault: Fault, _now: float) -> None:
    values["DCGM_FI_DEV_GPU_UTIL"] = 100
    values["DCGM_FI_DEV_CLOCKS_EVENT_REASONS"] = 0


def _straggle(values: dict[str, Value], fault: Fault, _now: float) -> None:
    factor = float(fault.params["factor"])
    values["DCGM_FI_DEV_SM_CLOCK"] = int((values["DCGM_FI_DEV_SM_CLOCK"] or 0) * factor)
    for name in (
        "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "DCGM_FI_PROF_DRAM_ACTIVE",
    ):
        values[name] = (values[name] or 0) * factor


def _throttle(values: dict[str, Value], fault: Fault, now: float) -> None:
    mask = int(fault.params["mask"])
    throttled_ns = int((min(now, fault.until) - fault.since) * 1e9)
    for bits, name in ((0x60, "THERMAL_VIOLATION"), (0x84, "POWER_VIOLATION")):
        if mask & bits:
            counter = f"DCGM_FI_DEV_{name}"
            values[counter] = int(values[counter] or 0) + throttled_ns
    if now < fault.until:
        reasons = int(values["DCGM_FI_DEV_CLOCKS_EVENT_REASONS"] or 0)
        values["DCGM_FI_DEV_CLOCKS_EVENT_REASONS"] = reasons | mask
        clock = fault.params["sm_clock"]
        full = int(values["DCGM_FI_DEV_SM_CLOCK"] or 0)
        values["DCGM_FI_DEV_SM_CLOCK"] = full // 2 if clock is None else clock


def _grow(values: dict[str, Value], fault: Fault, now: float) -> None:
    grown = fault.params["per_second"] * (min(now, fault.until) - fault.since)
    metric = fault.params["metric"]
    values[metric] = int((values[metric] or 0) + grown)


def _recovery(values: dict[str, Value], fault: Fault, _now: float) -> None:
    values["DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION"] = int(fault.params["action"])


def _override(values: dict[str, Value], fault: Fault, _now: float) -> None:
    values[fault.params["metric"]] = fault.params["value"]


def _nothing(_values: dict[str, Value], _fault: Fault, _now: float) -> None:
    """`idle` acts through the GPU's work alone."""


_EFFECTS: Mapping[FaultKind, Effect] = {
    FaultKind.XID: _set_xid,
    FaultKind.DBE: _add("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"),
    FaultKind.SBE: _add("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"),
    FaultKind.ROW_REMAP_FAILED: _set("DCGM_FI_DEV_ROW_REMAP_FAILURE", 1),
    FaultKind.ROW_REMAP_PENDING: _set("DCGM_FI_DEV_ROW_REMAP_PENDING", 1),
    FaultKind.TEMPERATURE: _heat,
    FaultKind.IDLE: _nothing,
    FaultKind.HANG: _hang,
    FaultKind.STRAGGLER: _straggle,
    FaultKind.CLOCK_REASONS: _throttle,
    FaultKind.RECOVERY_ACTION: _recovery,
    FaultKind.SET: _override,
    FaultKind.RATE: _grow,
}
