"""Words for what can be wrong with a node, and for how sure we are."""

from enum import StrEnum


class FaultClass(StrEnum):
    """The kind of a fault, as it appears in findings, incidents, events and policies."""

    XID = "xid"
    ECC_UNCORRECTABLE = "ecc_uncorrectable"
    ECC_CORRECTABLE_TREND = "ecc_correctable_trend"
    ROW_REMAP_FAILED = "row_remap_failed"
    ROW_REMAP_PENDING = "row_remap_pending"
    PAGE_RETIREMENT = "page_retirement"
    SRAM_THRESHOLD = "sram_threshold"
    GPU_LOST = "gpu_lost"
    RECOVERY_ACTION = "recovery_action"
    NVLINK = "nvlink"
    PCIE_REPLAY = "pcie_replay"
    FABRIC = "fabric"
    GPU_HEALTH = "gpu_health"
    THERMAL = "thermal"
    POWER_BRAKE = "power_brake"
    CLOCK_THROTTLED = "clock_throttled"
    HANG = "hang"
    STRAGGLER = "straggler"
    ALLOCATED_IDLE = "allocated_idle"
    NEURON_ECC = "neuron_ecc"
    NEURON_EXECUTION = "neuron_execution"
    TELEMETRY_LOST = "telemetry_lost"
    DEVICE_UNALLOCATABLE = "device_unallocatable"
    MANUAL = "manual"


class Verdict(StrEnum):
    """What a finding entitles nodemend to do."""

    FATAL = "fatal"
    """Act now."""
    DEGRADED = "degraded"
    """Act after the hold time."""
    SUSPECT = "suspect"
    """Needs a second signal; by itself it touches no node."""
    TELEMETRY = "telemetry"
    """The measurement is sick, not the node."""
    APPLICATION = "application"
    """The job did it, not the hardware."""

    @property
    def is_actionable(self) -> bool:
        """True if the finding alone may lead to a remediation."""
        return self in (Verdict.FATAL, Verdict.DEGRADED)

    @property
    def severity(self) -> int:
        """Order of urgency; smaller is more urgent."""
        return _SEVERITY[self]


_SEVERITY = {verdict: place for place, verdict in enumerate(Verdict)}
"""Asked for each finding of a scan: 32,000 times where every GPU of 2,000 nodes is an offender."""


class FaultKind(StrEnum):
    """How a fault is verified."""

    LEVEL = "level"
    """A state that can be read again now (a temperature, a lost GPU)."""
    EVENT = "event"
    """Something that happened (an XID): read again at the time of the evidence."""


class Scope(StrEnum):
    """What a finding of a rule is about."""

    GPU = "gpu"
    NODE = "node"
    FLEET = "fleet"


class Family(StrEnum):
    """Which of the three scheduled scans evaluates a rule."""

    ECC = "ecc"
    THERMAL = "thermal"
    UTILIZATION = "utilization"


class Rung(StrEnum):
    """One repair of the escalation ladder."""

    REBOOT = "reboot"
    REPLACE = "replace"
    STOP_START = "stop_start"
    RESET_GPU = "reset_gpu"
    HUMAN = "human"


class Mode(StrEnum):
    """How far nodemend may go."""

    DRY_RUN = "dry_run"
    CORDON_ONLY = "cordon_only"
    ENFORCE = "enforce"
