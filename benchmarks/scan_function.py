"""The function's process of the scan benchmark: one job as JSON on standard input, one answer out.

It is what runs on Lambda (the function's imports, the real AMP adapter through a signed HTTP
request) but for the stores, which are in memory: they would measure DynamoDB's emulation.
"""

import json
import resource
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import requests
from botocore.credentials import Credentials

from nodemend import bootstrap  # noqa: F401 - the function imports it: its memory is the function's
from nodemend.adapters.amp import AmpMetrics
from nodemend.application.ports import Report
from nodemend.application.scan_gpu_health import ScanPorts, scan_gpu_health
from nodemend.application.sight import LOOKED
from nodemend.catalogue import load_catalogue
from nodemend.contracts.scan import ScanGpuHealthRequest, ScanGpuHealthResult
from nodemend.domain.events import DetailType
from nodemend.domain.faults import Family
from nodemend.domain.policy import ClusterPolicy, Policy
from tests.fakes.control import MemoryPolicies
from tests.fakes.messages import MemoryEventBus, MemoryTelemetry
from tests.fakes.stores import MemoryGuards, MemoryScanMemory
from tests.fakes.system import ManualClock

_BARE_WORKERS = 8
"""As many queries side by side as the adapter sends."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does."""

    front: str
    """Base URL of the emulated AMP."""
    prometheus: str
    region: str
    workspace: str
    cluster: str
    access_key_id: str
    secret_access_key: str
    session_token: str
    at: float
    """Unix seconds at which the queries are evaluated."""
    family: str
    queries: Mapping[str, str]
    pairs: int
    """0: one scan and nothing else, for its memory."""


class _Scanner:
    def __init__(self, job: Job) -> None:
        keys = Credentials(job.access_key_id, job.secret_access_key, job.session_token)
        self._request = ScanGpuHealthRequest(family=Family(job.family))
        self._metrics = AmpMetrics(credentials=keys, endpoint_url=job.front)
        self._policy = Policy(clusters=(ClusterPolicy(job.cluster, job.workspace, job.region),))
        self._catalogue = load_catalogue()
        self._clock = ManualClock(datetime.fromtimestamp(job.at, UTC))

    def scan(self) -> tuple[float, ScanGpuHealthResult, MemoryEventBus]:
        """Scan once, with a memory in which every finding is news."""
        bus = MemoryEventBus()
        memory = MemoryScanMemory(self._clock)
        # What is exported is counted once an hour: that is no part of a usual scan.
        memory.remember(self._policy.clusters[0].name, {LOOKED: Report("", self._clock.now())})
        ports = ScanPorts(
            metrics=self._metrics,
            sight=self._metrics,
            policies=MemoryPolicies(self._policy),
            bus=bus,
            memory=memory,
            guards=MemoryGuards(),
            telemetry=MemoryTelemetry(),
            catalogue=self._catalogue,
            clock=self._clock,
        )
        began = time.perf_counter()
        result = scan_gpu_health(self._request, ports=ports)
        return time.perf_counter() - began, result, bus


def _bare(job: Job) -> tuple[float, dict[str, bytes]]:
    """Send the same queries unsigned, side by side, and read their answers without a look."""
    form = {"time": f"{job.at:.3f}", "stats": "all"}
    began = time.perf_counter()
    with requests.Session() as session, ThreadPoolExecutor(_BARE_WORKERS) as pool:

        def ask(query: str) -> bytes:
            answer = session.post(
                f"{job.prometheus}/api/v1/query", data={"query": query, **form}, timeout=120
            )
            answer.raise_for_status()
            return answer.content

        answers = dict(zip(job.queries, pool.map(ask, job.queries.values()), strict=True))
    return time.perf_counter() - began, answers


def run(job: Job) -> dict[str, Any]:
    """Do a job; durations are in seconds, memory in MiB."""
    scanner = _Scanner(job)
    took_s, result, bus = scanner.scan()
    report: dict[str, Any] = {
        "first_scan_s": took_s,
        "peak_mib": _peak_mib(),
        "findings": result.findings,
        "unknown_rules": result.unknown_rules,
        "announced": result.announced,
        **_found(bus),
    }
    if job.pairs:
        report |= _pairs(job, scanner)
    return report


def _peak_mib() -> float:
    """Return the most memory that this process ever held.

    Linux carries `ru_maxrss` over an exec, so that a small child of a large parent shows the
    parent's; `VmHWM` begins anew.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(one for one in status.read_text().splitlines() if one.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 / 1024


def _found(bus: MemoryEventBus) -> dict[str, Any]:
    rules: set[str] = set()
    gpus: set[tuple[str, str]] = set()
    blind: dict[str, str] = {}
    for event in bus.accepted:
        if event.detail_type is DetailType.GPU_FAULT_DETECTED:
            for finding in event.detail["findings"]:
                rules.add(finding["evidence"]["rule_id"])
                gpus.add((str(finding["node_names"]), finding["gpu_uuid"]))
        else:
            blind |= {one["rule_id"]: one["reason"]["text"] for one in event.detail["rules"]}
    return {"rules": sorted(rules), "gpus": len(gpus), "blind": blind}


def _pairs(job: Job, scanner: _Scanner) -> dict[str, Any]:
    """Alternate scan and bare queries, and which of them comes first."""
    _, answers = _bare(job)
    report: dict[str, Any] = {
        "answer_bytes": sum(len(body) for body in answers.values()),
        "samples": {key: _samples(body) for key, body in answers.items()},
    }
    answers.clear()
    scans: list[float] = []
    bares: list[float] = []
    own: list[float] = []

    def scan() -> None:
        began = time.process_time()
        scans.append(scanner.scan()[0])
        own.append(time.process_time() - began)

    for number in range(job.pairs):
        if number % 2:
            bares.append(_bare(job)[0])
            scan()
        else:
            scan()
            bares.append(_bare(job)[0])
    alone = {
        key: _bare(replace(job, queries={key: query}))[0] for key, query in job.queries.items()
    }
    return {**report, "scan_s": scans, "bare_s": bares, "own_s": own, "alone_s": alone}


def _samples(body: bytes) -> int:
    return int(json.loads(body)["data"]["stats"]["samples"]["totalQueryableSamples"])


def main() -> int:
    """Read a job, print its report."""
    print(json.dumps(run(Job(**json.load(sys.stdin)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
