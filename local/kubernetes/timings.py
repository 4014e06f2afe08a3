"""How fast the emulated cluster lives."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """Durations in seconds; the defaults are the real ones where the real ones are bearable."""

    reaction_s: float = 0.02
    """Between a change and the controllers' reaction to it, on the background thread. An idle
    real cluster took 6 to 192 ms."""
    start_s: float = 1.0
    """From the binding of a pod to Running and Ready. Real GPU pods pull images for minutes."""
    termination_s: float | None = None
    """From the deletion of a pod to its end; None: its whole grace period, the longest it can
    take. A pod never takes longer than its grace period."""
    monitor_grace_s: float = 50.0
    """From the last sign of a kubelet to Ready=Unknown."""
    orphan_s: float = 48.0
    """From the removal of a node to the removal of its pods, as measured on a real cluster."""
    heartbeat_s: float = 300.0
    """Between two status posts of a kubelet that has nothing to tell."""
    disruption_timeout_s: float = 120.0
    """How long a budget counts an eviction as under way that never became a deletion."""
    conflict_retry_s: float = 10.0
    """How long an eviction of a Pending, finished or terminating pod is retried on a conflict."""
