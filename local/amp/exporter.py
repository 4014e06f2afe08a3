"""A fleet of simulated dcgm-exporters, served over HTTP for a real Prometheus to scrape.

`GpuFleet` is a model of nodes and GPUs whose every value is a function of the seed and the time, so
that history can be written and scraped from the same source without a seam. Faults are put in
force and lifted while it runs. `ExporterApp` serves one `/metrics` page per node and the
service-discovery list from which Prometheus learns of nodes that join and leave.

What is kept true to dcgm-exporter (each has bitten someone): label names and their order, the
sticky XID gauge whose labels change with its code, the sliding-window XID count that falls back to
a series without `xid`, MIG rows, doubles with six decimals, pod labels on allocated GPUs only, and
series of a lost GPU that vanish instead of going to zero.
"""

import json
import math
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from werkzeug.wrappers import Request, Response

from local.amp.exposition import Dialect, Pairs, Printer, Row, label_text
from local.amp.gpus import INSTANCE_TYPES, GpuModel, InstanceShape
from local.amp.model import (
    NODE_WIDE,
    Fault,
    FaultKind,
    Gpu,
    MigInstance,
    Pod,
    checked_params,
)

JOB = "dcgm-exporter"
PORT = 9400
"""dcgm-exporter's port, as it stands in `instance`."""
XID_WINDOW_S = 300.0
"""dcgm-exporter's default window of DCGM_EXP_XID_ERRORS_COUNT."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """A node's exporter as service discovery announces it."""

    node: str
    address: str
    """`ip:9400`, which becomes `instance`."""
    path: str
    labels: Mapping[str, str]
    """Labels of the target: cluster, and (from pod discovery) the exporter's own pod."""

    @property
    def identity(self) -> Pairs:
        """All labels that Prometheus puts on what it scrapes here, `up` included."""
        return tuple(sorted({**self.labels, "instance": self.address, "job": JOB}.items()))


@dataclass(slots=True)
class _Node:
    name: str
    address: str
    dialect: Dialect
    labels: Mapping[str, str]
    exporter_pod: str
    gpus: list[Gpu]
    faults: list[Fault] = field(default_factory=list)
    rows: list[Row] | None = None
    """Compiled labels for scraping; None when they must be built again."""

    def compile(self, target: Pairs) -> list[Row]:
        return [
            Row(gpu, instance, self.dialect, self.name, target)
            for gpu in self.gpus
            for instance in gpu.mig or (None,)
        ]

    def down_status(self, at: float) -> int | None:
        for fault in self.faults:
            if fault.kind is FaultKind.EXPORTER_DOWN and fault.is_active(at):
                return int(fault.params["status"])
        return None

    def shown_time(self, at: float) -> float:
        """Return the time whose values a page shows: earlier than `at` while frozen."""
        frozen = [f.since for f in self.faults if f.kind is FaultKind.FROZEN and f.is_active(at)]
        return min([at, *frozen])

    def add(self, fault: Fault) -> None:
        if fault.gpu is None:
            self.faults.append(fault)
        else:
            self.gpus[fault.gpu].add(fault)

    def end(self, faults: Iterable[Fault], now: float) -> None:
        for fault in faults:
            fault.until = min(fault.until, max(now, fault.since))
        for gpu in self.gpus:
            gpu.integrate()

    def all_faults(self) -> list[Fault]:
        return [*self.faults, *(fault for gpu in self.gpus for fault in gpu.faults)]


class GpuFleet:
    """The GPU nodes of one cluster; safe to use from several threads.

    Args:
        cluster: Value of the `cluster` target label; None: the workspace has no such label.
        seed: Same seed, same UUIDs and values.
        metrics: Names that the counters file asks for, in its order; a name of DCGM 4.6 is printed
            as such. Default: all that are simulated.
        clock: Unix seconds.
        announces_pods: The scrape targets carry the exporter pod's own `namespace`, `pod` and
            `container`, as pod discovery gives them; with `honor_labels: false` the labels of the
            pod that holds the GPU become `exported_pod` and so on.
        xid_window_s: Length of the XID count's window.
    """

    def __init__(
        self,
        cluster: str | None = None,
        *,
        seed: int = 0,
        metrics: Iterable[str] | None = None,
        clock: Clock = time.time,
        announces_pods: bool = True,
        xid_window_s: float = XID_WINDOW_S,
    ) -> None:
        self.cluster = cluster
        self._seed = seed
        self._clock = clock
        self._announces_pods = announces_pods
        self._printer = Printer(metrics, xid_window_s)
        self._lock = threading.RLock()
        self._nodes: dict[str, _Node] = {}
        self._born = clock()
        self._added = 0

    # --- nodes

    def add_node(
        self,
        name: str,
        instance_type: str = "p5.48xlarge",
        *,
        address: str | None = None,
        gpus: int | None = None,
        model: GpuModel | None = None,
        pod: Pod | None = None,
        mig: Mapping[int, Sequence[MigInstance]] | None = None,
        dialect: Dialect | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Let a node join. A name that was there before comes back with other GPUs.

        Args:
            name: Kubernetes node name.
            instance_type: Decides model and number of GPUs if it is a known one.
            address: IP address; default: read from a name such as `ip-10-0-1-5…`, else made up.
            gpus: Number of GPUs, if not the instance type's.
            model: GPU model, if not the instance type's.
            pod: Holds every GPU of the node from the start (see `assign`).
            mig: MIG instances by GPU index.
            dialect: How its exporter prints labels.
            labels: More target labels, such as `node`.

        Raises:
            ValueError: The node is there, or the instance type is unknown and not described.
        """
        shape = _shape(instance_type, gpus, model)
        with self._lock:
            if name in self._nodes:
                raise ValueError(f"node {name!r} is there already")
            self._added += 1
            node = _Node(
                name=name,
                address=f"{address or _address(name, self._added)}:{PORT}",
                dialect=dialect or Dialect(),
                labels=dict(labels or {}),
                exporter_pod=f"dcgm-exporter-{self._identify(name, 'pod').hex[:5]}",
                gpus=[
                    self._make_gpu(name, index, shape.model, pod, tuple((mig or {}).get(index, ())))
                    for index in range(shape.gpus)
                ],
            )
            self._nodes[name] = node

    def remove_node(self, name: str) -> None:
        """Let a node leave: its page answers 404 and discovery no longer lists it."""
        with self._lock:
            self._node(name)
            del self._nodes[name]

    def node_names(self) -> list[str]:
        """Return the nodes in the order in which they joined."""
        with self._lock:
            return list(self._nodes)

    def uuids(self, name: str) -> list[str]:
        """Return the GPU UUIDs of a node by index."""
        with self._lock:
            return [gpu.uuid for gpu in self._node(name).gpus]

    def set_dialect(self, name: str, dialect: Dialect) -> None:
        """Change how a node prints labels, as an upgrade of its exporter does."""
        with self._lock:
            node = self._node(name)
            node.dialect = dialect
            node.rows = None

    def swap_gpu(self, name: str, index: int) -> str:
        """Put another physical GPU in; return its UUID. Its faults are gone with the old one."""
        with self._lock:
            node = self._node(name)
            old = self._gpu(node, index)
            self._added += 1
            node.gpus[index] = self._make_gpu(name, index, old.model, old.pod, old.mig)
            node.rows = None
            return node.gpus[index].uuid

    # --- pods

    def assign(self, name: str, gpus: Iterable[int] | None, pod: Pod | None) -> None:
        """Let a pod hold GPUs (None: all of the node), or free them (pod None).

        As in production the labels change, so the counters go on in other series. The GPUs of an
        allocated pod work; use the fault `idle` for one that does not.
        """
        with self._lock:
            node = self._node(name)
            now = self._clock()
            indexes = range(len(node.gpus)) if gpus is None else gpus
            for gpu in [self._gpu(node, index) for index in indexes]:
                if gpu.pod != pod:
                    gpu.hold(pod, now)
                    node.rows = None

    # --- faults

    def inject(
        self,
        node: str,
        gpu: int | None,
        kind: FaultKind | str,
        *,
        at: float | None = None,
        until: float | None = None,
        survives_reboot: bool | None = None,
        **params: Any,  # noqa: ANN401 - each kind has its own, checked below
    ) -> list[Fault]:
        """Put a fault in force and return it (one per GPU).

        Args:
            node: The node's name.
            gpu: Index of the GPU; None: every GPU of the node, or its exporter.
            kind: See `FaultKind`, also for the parameters of each.
            at: Since when, Unix seconds; default now. A time before the start of Prometheus is
                seen in the backfilled history too, one in the future comes by itself.
            until: When it ends by itself; default never.
            survives_reboot: Whether `reboot` leaves it in force: broken hardware, not a hiccup. An
                XID that survives is seen anew after the reboot. Default: only for
                `row_remap_failed`.
            **params: The kind's parameters.

        Raises:
            ValueError: Unknown node, GPU, kind or metric; a parameter missing or unknown.
        """
        known = FaultKind(kind)
        checked = checked_params(known, params)
        if known in NODE_WIDE and gpu is not None:
            raise ValueError(f"fault {known.value!r} is about the node: give gpu None")
        lasting = known is FaultKind.ROW_REMAP_FAILED
        with self._lock:
            place = self._node(node)
            since = self._clock() if at is None else at
            if known in NODE_WIDE:
                indexes: Sequence[int | None] = [None]
            elif gpu is None:
                indexes = range(len(place.gpus))
            else:
                indexes = [self._gpu(place, gpu).index]
            made = [
                Fault(
                    node=node,
                    gpu=index,
                    kind=known,
                    params=checked,
                    since=since,
                    until=math.inf if until is None else until,
                    survives_reboot=lasting if survives_reboot is None else survives_reboot,
                )
                for index in indexes
            ]
            for fault in made:
                place.add(fault)
            return made

    def clear(self, node: str, gpu: int | None = None, kind: FaultKind | str | None = None) -> int:
        """Lift the faults of a node (and GPU, and kind, where given) now; return how many.

        Counters of `rate` and `clock_reasons` keep their height; those of `dbe` and `sbe` fall
        back, as after a driver reload.
        """
        with self._lock:
            now = self._clock()
            place = self._node(node)
            wanted = None if kind is None else FaultKind(kind)
            ended = [
                fault
                for fault in place.all_faults()
                if fault.until > now
                and wanted in (None, fault.kind)
                and (gpu is None or fault.gpu == gpu)
            ]
            place.end(ended, now)
            return len(ended)

    def lift(self, fault: Fault) -> None:
        """Lift one fault now, as `inject` returned it."""
        with self._lock:
            node = self._nodes.get(fault.node)
            if node is not None:
                node.end([fault], self._clock())

    def faults(self, node: str) -> list[Fault]:
        """Return the faults in force on a node now."""
        with self._lock:
            now = self._clock()
            return [f for f in self._node(node).all_faults() if f.is_active(now)]

    def reboot(self, node: str, *, down_s: float = 0.0) -> None:
        """Do to the metrics what a reboot does.

        The XID gauge and the driver's counters start again at 0, pending remaps and lost GPUs are
        mended, unless the fault was injected with `survives_reboot`. The exporter is down for
        `down_s`.
        """
        with self._lock:
            place = self._node(node)
            now = self._clock()
            standing = [fault for fault in place.all_faults() if fault.until > now]
            place.end([fault for fault in standing if not fault.survives_reboot], now)
            for fault in standing:
                if fault.survives_reboot and fault.kind is FaultKind.XID:
                    fault.since = max(fault.since, now + down_s)
            for gpu in place.gpus:
                gpu.reboot(now)
            if down_s > 0:
                self.inject(node, None, FaultKind.EXPORTER_DOWN, until=now + down_s)

    # --- scraping

    def targets(self, prefix: str = "") -> list[ScrapeTarget]:
        """Return what service discovery lists; `prefix` stands before each path."""
        with self._lock:
            return [self._target(node, prefix) for node in self._nodes.values()]

    def scrape(self, name: str, at: float | None = None) -> tuple[int, str]:
        """Return status and text of a node's `/metrics` page at a time (default now)."""
        with self._lock:
            node = self._nodes.get(name)
            if node is None:
                return 404, "404 page not found\n"
            now = self._clock() if at is None else at
            status = node.down_status(now)
            if status is not None:
                return status, "exporter is down\n"
            if node.rows is None:
                node.rows = node.compile(())
            return 200, self._printer.page(node.rows, node.shown_time(now))

    def history(self, start: float, end: float, step_s: float) -> Iterator[str]:
        """Yield OpenMetrics lines for all nodes from `start` to `end` inclusive, every `step_s`.

        The labels are those that Prometheus gives the scraped series, as the fleet is now: a pod
        that holds a GPU now held it all the time. Faults count from the time they have in `at`.
        """
        with self._lock:
            steps = [
                start + i * step_s for i in range(math.floor((end - start) / step_s + 1e-9) + 1)
            ]
            for node in self._nodes.values():
                target = self._target(node, "")
                rows = node.compile(target.identity)
                identity = label_text(target.identity)
                for at in steps:
                    is_down = node.down_status(at) is not None
                    yield f"up{{{identity}}} {0 if is_down else 1} {at:.3f}"
                    if not is_down:
                        shown = node.shown_time(at)
                        yield from self._printer.samples(rows, shown, f" {at:.3f}")

    # --- the model

    def _identify(self, *parts: object) -> uuid.UUID:
        text = "/".join(str(part) for part in (self._seed, self.cluster, self._added, *parts))
        return uuid.uuid5(uuid.NAMESPACE_URL, text)

    def _make_gpu(
        self, node: str, index: int, model: GpuModel, pod: Pod | None, mig: tuple[MigInstance, ...]
    ) -> Gpu:
        identity = self._identify(node, "gpu", index)
        dice = random.Random(identity.int)  # noqa: S311 - a simulation
        return Gpu(index, f"GPU-{identity}", model, pod=pod, mig=mig, dice=dice, born=self._born)

    def _node(self, name: str) -> _Node:
        node = self._nodes.get(name)
        if node is None:
            raise ValueError(f"no node {name!r}; there are {', '.join(self._nodes) or 'none'}")
        return node

    @staticmethod
    def _gpu(node: _Node, index: int) -> Gpu:
        if not 0 <= index < len(node.gpus):
            raise ValueError(f"node {node.name!r} has no GPU {index}")
        return node.gpus[index]

    def _target(self, node: _Node, prefix: str) -> ScrapeTarget:
        labels = dict(node.labels)
        if self.cluster is not None:
            labels.setdefault("cluster", self.cluster)
        if self._announces_pods:
            labels.setdefault("namespace", "gpu-monitoring")
            labels.setdefault("pod", node.exporter_pod)
            labels.setdefault("container", "exporter")
        path = f"{prefix}/nodes/{quote(node.name, safe='')}/metrics"
        return ScrapeTarget(node.name, node.address, path, labels)


def counters_file_metrics(text: str) -> list[str]:
    """Return the metric names that a dcgm-exporter counters file asks for, labels left out.

    Give them to `GpuFleet(metrics=…)`, so that a fleet exports what the file says. Names that the
    simulation does not know are ignored there.
    """
    names = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 2 and not parts[0].startswith("#") and parts[1] != "label":
            names.append(parts[0])
    return names


def _shape(instance_type: str, gpus: int | None, model: GpuModel | None) -> InstanceShape:
    known = INSTANCE_TYPES.get(instance_type)
    if known is not None:
        return InstanceShape(model or known.model, known.gpus if gpus is None else gpus)
    if gpus is None or model is None:
        raise ValueError(f"unknown instance type {instance_type!r}: give gpus and model")
    return InstanceShape(model, gpus)


def _address(name: str, number: int) -> str:
    found = re.match(r"ip-(\d+)-(\d+)-(\d+)-(\d+)\b", name)
    if found:
        return ".".join(found.groups())
    return f"10.1.{number // 250}.{number % 250 + 1}"


class ExporterApp:
    """WSGI application: the pages of all nodes of some fleets, and the discovery list.

    - `/sd/<group>`: targets for Prometheus' `http_sd_configs`
    - `/fleets/<n>/nodes/<name>/metrics`: one node's page

    Args:
        groups: Fleets by group; a Prometheus scrapes one group (one AMP workspace).
    """

    def __init__(self, groups: Mapping[str, Sequence[GpuFleet]]) -> None:
        self._fleets: list[GpuFleet] = []
        self._groups: dict[str, list[int]] = {}
        for group, fleets in groups.items():
            self._groups[group] = []
            for fleet in fleets:
                self._groups[group].append(len(self._fleets))
                self._fleets.append(fleet)

    def targets(self, group: str) -> list[ScrapeTarget]:
        """Return what `/sd/<group>` lists now."""
        return [
            target
            for number in self._groups[group]
            for target in self._fleets[number].targets(f"/fleets/{number}")
        ]

    def __call__(
        self,
        environ: dict[str, Any],
        start_response: Callable[..., Any],
    ) -> Iterable[bytes]:
        """Answer one request."""
        return self._answer(Request(environ))(environ, start_response)

    def _answer(self, request: Request) -> Response:
        parts = [unquote(part) for part in request.path.split("/")[1:]]
        if len(parts) == 2 and parts[0] == "sd" and parts[1] in self._groups:
            listed = [
                {
                    "targets": [target.address],
                    "labels": {**target.labels, "__metrics_path__": target.path},
                }
                for target in self.targets(parts[1])
            ]
            return Response(json.dumps(listed), mimetype="application/json")
        if len(parts) == 5 and (parts[0], parts[2], parts[4]) == ("fleets", "nodes", "metrics"):
            number = int(parts[1]) if parts[1].isdecimal() else len(self._fleets)
            if number < len(self._fleets):
                status, text = self._fleets[number].scrape(parts[3])
                kind = "text/plain; version=0.0.4; charset=utf-8"
                return Response(text, status, content_type=kind)
        return Response("404 page not found\n", 404)


__all__ = [
    "JOB",
    "Dialect",
    "ExporterApp",
    "Fault",
    "FaultKind",
    "GpuFleet",
    "MigInstance",
    "Pod",
    "ScrapeTarget",
    "counters_file_metrics",
]
