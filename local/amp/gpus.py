"""Tables of the simulated hardware: GPU models, instance types, the exporter's metrics.

Values are plausible, not specifications: a rule must read limits such as the slowdown temperature
from the series, as it must in production.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class OnMig(StrEnum):
    """What becomes of a metric on a GPU that is cut into MIG instances."""

    REPEATED = "repeated"
    """The physical GPU's value stands in one row per instance (power, temperature, XID…)."""
    SHARED = "shared"
    """Each instance has its part of the value (frame buffer)."""
    ABSENT = "absent"
    """There is no row at all (utilization, remapped rows), as in the A800 scrape of case D45."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the exporter's counters file."""

    name: str
    type: str
    help: str
    on_mig: OnMig = OnMig.REPEATED
    needs_nvlink: bool = False
    is_ratio: bool = False
    """DCGM doubles are printed with six decimals, integers without any."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A kind of GPU as the simulation needs it."""

    name: str
    """As `modelName` prints it."""
    memory_mib: int
    power_limit_w: int
    idle_power_w: int
    max_sm_clock_mhz: int
    memory_clock_mhz: int
    slowdown_c: int
    busy_c: int
    has_memory_temp: bool = True
    """Without: the driver reports 0 (case D7)."""
    has_nvlink: bool = True


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """GPUs of an EC2 instance type."""

    model: GpuModel
    gpus: int


A10G = GpuModel("NVIDIA A10G", 23028, 300, 22, 1710, 6251, 94, 58, False, False)
A100_40 = GpuModel("NVIDIA A100-SXM4-40GB", 40960, 400, 52, 1410, 1215, 89, 58)
A100_80 = GpuModel("NVIDIA A100-SXM4-80GB", 81920, 400, 60, 1410, 1593, 89, 60)
A800 = GpuModel("NVIDIA A800-SXM4-80GB", 81920, 400, 60, 1410, 1593, 89, 60)
B200 = GpuModel("NVIDIA B200", 183359, 1000, 140, 1965, 3996, 90, 58)
H100 = GpuModel("NVIDIA H100 80GB HBM3", 81559, 700, 72, 1980, 2619, 89, 61)
H200 = GpuModel("NVIDIA H200", 143771, 700, 76, 1980, 3201, 89, 60)
L4 = GpuModel("NVIDIA L4", 23034, 72, 16, 2040, 6251, 94, 62, False, False)
L40S = GpuModel("NVIDIA L40S", 46068, 350, 34, 2520, 9001, 94, 60, False, False)
T4 = GpuModel("Tesla T4", 15360, 70, 10, 1590, 5000, 93, 62, False, False)
V100 = GpuModel("Tesla V100-SXM2-16GB", 16384, 300, 42, 1530, 877, 87, 56)

INSTANCE_TYPES: Mapping[str, InstanceShape] = {
    "g4dn.xlarge": InstanceShape(T4, 1),
    "g4dn.12xlarge": InstanceShape(T4, 4),
    "g5.xlarge": InstanceShape(A10G, 1),
    "g5.2xlarge": InstanceShape(A10G, 1),
    "g5.12xlarge": InstanceShape(A10G, 4),
    "g5.48xlarge": InstanceShape(A10G, 8),
    "g6.xlarge": InstanceShape(L4, 1),
    "g6.12xlarge": InstanceShape(L4, 4),
    "g6.48xlarge": InstanceShape(L4, 8),
    "g6e.12xlarge": InstanceShape(L40S, 4),
    "g6e.48xlarge": InstanceShape(L40S, 8),
    "p3.16xlarge": InstanceShape(V100, 8),
    "p4d.24xlarge": InstanceShape(A100_40, 8),
    "p4de.24xlarge": InstanceShape(A100_80, 8),
    "p5.4xlarge": InstanceShape(H100, 1),
    "p5.48xlarge": InstanceShape(H100, 8),
    "p5e.48xlarge": InstanceShape(H200, 8),
    "p5en.48xlarge": InstanceShape(H200, 8),
    "p6-b200.48xlarge": InstanceShape(B200, 8),
}

_PCI_SLOTS = ("53", "64", "75", "86", "97", "A8", "B9", "CA")

XID_COUNT = "DCGM_EXP_XID_ERRORS_COUNT"
XID_ERRORS = "DCGM_FI_DEV_XID_ERRORS"


def pci_bus_id(index: int) -> str:
    """Return an address in the eight-digit domain form of the exporter."""
    domain, slot = divmod(index, len(_PCI_SLOTS))
    return f"{domain:08d}:{_PCI_SLOTS[slot]}:00.0"


def _dev(name: str, kind: str, text: str, on_mig: OnMig = OnMig.REPEATED) -> Metric:
    return Metric(f"DCGM_FI_DEV_{name}", kind, text, on_mig)


def _nvlink(name: str, text: str) -> Metric:
    return Metric(f"DCGM_FI_DEV_NVLINK_{name}", "counter", text, needs_nvlink=True)


def _ratio(name: str, text: str) -> Metric:
    return Metric(f"DCGM_FI_PROF_{name}", "gauge", text, is_ratio=True)


METRICS: tuple[Metric, ...] = (
    _dev("SM_CLOCK", "gauge", "SM clock (MHz)."),
    _dev("MEM_CLOCK", "gauge", "Memory clock (MHz)."),
    _dev("MEMORY_TEMP", "gauge", "Memory temperature (C)."),
    _dev("GPU_TEMP", "gauge", "GPU temperature (C)."),
    _dev("SLOWDOWN_TEMP", "gauge", "Temperature at which this GPU slows down (C)."),
    Metric("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (W).", is_ratio=True),
    _dev("TOTAL_ENERGY_CONSUMPTION", "counter", "Energy since the driver was loaded (mJ)."),
    _dev("CLOCKS_EVENT_REASONS", "gauge", "Bitmask of the reasons for the present clocks."),
    _dev("POWER_VIOLATION", "counter", "Time throttled for power (ns)."),
    _dev("THERMAL_VIOLATION", "counter", "Time throttled for heat (ns)."),
    _dev("PCIE_REPLAY_COUNTER", "counter", "PCIe retries."),
    _dev("GPU_UTIL", "gauge", "GPU utilization (%).", OnMig.ABSENT),
    _dev("MEM_COPY_UTIL", "gauge", "Memory utilization (%).", OnMig.ABSENT),
    _dev("ENC_UTIL", "gauge", "Encoder utilization (%).", OnMig.ABSENT),
    _dev("DEC_UTIL", "gauge", "Decoder utilization (%).", OnMig.ABSENT),
    _dev("XID_ERRORS", "gauge", "The last XID seen."),
    Metric(XID_COUNT, "counter", "XIDs seen within the window."),
    _dev("FB_FREE", "gauge", "Free frame buffer (MiB).", OnMig.SHARED),
    _dev("FB_USED", "gauge", "Used frame buffer (MiB).", OnMig.SHARED),
    _dev("FB_RESERVED", "gauge", "Reserved frame buffer (MiB).", OnMig.SHARED),
    _dev("ECC_SBE_VOL_TOTAL", "counter", "Single-bit ECC errors since the driver was loaded."),
    _dev("ECC_DBE_VOL_TOTAL", "counter", "Double-bit ECC errors since the driver was loaded."),
    _dev("UNCORRECTABLE_REMAPPED_ROWS", "counter", "Rows remapped for good.", OnMig.ABSENT),
    _dev("CORRECTABLE_REMAPPED_ROWS", "counter", "Rows remapped in advance.", OnMig.ABSENT),
    _dev("ROW_REMAP_FAILURE", "gauge", "1: a row could not be remapped.", OnMig.ABSENT),
    _dev("ROW_REMAP_PENDING", "gauge", "1: a remapping waits for a reset.", OnMig.ABSENT),
    _dev("GET_GPU_RECOVERY_ACTION", "gauge", "What the driver asks for; 0 is nothing."),
    _nvlink("CRC_FLIT_ERROR_COUNT_TOTAL", "NVLink flow-control CRC errors."),
    _nvlink("CRC_DATA_ERROR_COUNT_TOTAL", "NVLink data CRC errors."),
    _nvlink("REPLAY_ERROR_COUNT_TOTAL", "NVLink retries."),
    _nvlink("RECOVERY_ERROR_COUNT_TOTAL", "NVLink recoveries."),
    _nvlink("BANDWIDTH_TOTAL", "NVLink traffic over all lanes."),
    Metric(
        "DCGM_FI_DEV_FABRIC_MANAGER_STATUS",
        "gauge",
        "State of the fabric registration; 3 is success.",
        needs_nvlink=True,
    ),
    _ratio("GR_ENGINE_ACTIVE", "Share of time with the graphics engine active."),
    _ratio("PIPE_TENSOR_ACTIVE", "Share of cycles with the tensor pipe active."),
    _ratio("DRAM_ACTIVE", "Share of cycles with the memory interface active."),
)

METRICS_BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}

RENAMED: Mapping[str, str] = {
    f"DCGM_FI_DEV_{new}": f"DCGM_FI_DEV_{old}"
    for new, old in {
        "XID_ERROR": "XID_ERRORS",
        "GPU_TEMP_CELSIUS": "GPU_TEMP",
        "MEMORY_TEMP_CELSIUS": "MEMORY_TEMP",
        "GPU_TEMP_SLOWDOWN_CELSIUS": "SLOWDOWN_TEMP",
        "BOARD_POWER_WATTS": "POWER_USAGE",
        "GPU_UTIL_RATIO": "GPU_UTIL",
        "PCIE_REPLAY_TOTAL": "PCIE_REPLAY_COUNTER",
        "ROW_REMAP_UNCORRECTABLE_TOTAL": "UNCORRECTABLE_REMAPPED_ROWS",
        "ROW_REMAP_CORRECTABLE_TOTAL": "CORRECTABLE_REMAPPED_ROWS",
        "ROW_REMAP_FAILED": "ROW_REMAP_FAILURE",
        "NVLINK_CRC_FLIT_ERROR_TOTAL": "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
        "NVLINK_CRC_DATA_ERROR_TOTAL": "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
        "NVLINK_REPLAY_ERROR_TOTAL": "NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        "NVLINK_RECOVERY_ERROR_TOTAL": "NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
        "NVLINK_THROUGHPUT_TOTAL": "NVLINK_BANDWIDTH_TOTAL",
        "GPU_RECOVERY_ACTION": "GET_GPU_RECOVERY_ACTION",
        "CLOCK_THROTTLE_REASONS": "CLOCKS_EVENT_REASONS",
    }.items()
}
"""Other names under which a counters file may ask for a metric (DCGM 4.6 renames and an older one).

The exporter prints whatever name the file uses.
"""

XID_TEXTS: Mapping[int, str] = {
    0: "No Error",
    13: "Graphics Engine Exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "Preemptive cleanup",
    48: "Double Bit ECC Error",
    54: "Auxiliary power is not connected to the GPU board",
    62: "Internal micro-controller halt",
    63: "Row remapping recording event",
    64: "Row remapper recording failure",
    74: "NVLINK Error",
    79: "GPU has fallen off the bus",
    92: "High single-bit ECC error rate",
    94: "Contained ECC error",
    95: "Uncontained ECC error",
    109: "Context Switch Timeout Error",
    119: "GSP RPC Timeout",
    120: "GSP Error",
    140: "Unrecovered ECC Error",
    143: "GPU Initialization Failure",
    154: "GPU Recovery Action Changed",
}
"""`err_msg` of some XIDs; the exporter prints `Unknown Error` for codes that it has no text for."""
