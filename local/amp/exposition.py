"""How dcgm-exporter prints: label names, their order, and which rows a metric has."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from local.amp.gpus import (
    METRICS,
    METRICS_BY_NAME,
    RENAMED,
    XID_COUNT,
    XID_ERRORS,
    XID_TEXTS,
    Metric,
    OnMig,
    pci_bus_id,
)
from local.amp.model import Gpu, MigInstance, Pod, Value

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a node's exporter prints its labels; versions and flags differ within a fleet."""

    hostname_label: str | None = "Hostname"
    """`Hostname` up to 4.5.3, `hostname` on later builds, None with `-n`."""
    hostname: str | None = None
    """Its value; default the node's name. Without NODE_NAME the exporter prints its own pod's."""
    driver_version: str | None = "570.172.08"
    """Value of DCGM_FI_DRIVER_VERSION; None: the counters file does not ask for the label."""
    has_uuid: bool = True
    """False: a relabelling rule dropped it."""
    has_pci_bus_id: bool = True
    """False: exporters before June 2024."""
    has_xid_labels: bool = True
    """err_code and err_msg; False: exporters before 3.3.6."""


class Row:
    """One GPU or MIG instance, with its labels ready to print.

    Args:
        gpu: The physical GPU.
        instance: The MIG instance; None for a whole GPU.
        dialect: How the node's exporter prints.
        node: The node's name.
        target: Labels of the scrape target, to print what Prometheus stores rather than what the
            exporter says; empty for the latter. A label that both have is renamed `exported_…`, as
            `honor_labels: false` does.
    """

    def __init__(
        self, gpu: Gpu, instance: MigInstance | None, dialect: Dialect, node: str, target: Pairs
    ) -> None:
        self.gpu = gpu
        self.has_xid_labels = dialect.has_xid_labels
        version = dialect.driver_version
        fixed = (("DCGM_FI_DRIVER_VERSION", version),) if version else ()
        head = _head(gpu, instance, dialect, node)
        self._maker = _maker(head, fixed, _pod_labels(gpu.pod), target)
        self._texts: dict[Pairs, str] = {}
        self.plain = self._maker(())

    def labels(self, extra: Pairs) -> str:
        """Return the label text with more labels, each where the exporter prints it."""
        text = self._texts.get(extra)
        if text is None:
            text = self._texts[extra] = self._maker(extra)
        return text


class Printer:
    """Prints samples for the metrics that a counters file asks for.

    Args:
        names: Metric names in the file's order, DCGM 4.6 names included; None: all simulated ones.
        xid_window_s: Length of the XID count's window.
    """

    def __init__(self, names: Iterable[str] | None, xid_window_s: float) -> None:
        wanted = [metric.name for metric in METRICS] if names is None else list(names)
        self._metrics: list[tuple[str, Metric]] = []
        for name in wanted:
            metric = METRICS_BY_NAME.get(RENAMED.get(name, name))
            if metric is not None:
                self._metrics.append((name, metric))
        self._xid_window_s = xid_window_s
        self._window = ("window_size_in_ms", str(int(xid_window_s * 1000)))

    def page(self, rows: Sequence[Row], now: float) -> str:
        """Return a `/metrics` page: HELP, TYPE and the rows of each metric."""
        by_metric: dict[str, list[str]] = {name: [] for name, _ in self._metrics}
        for name, line in self._lines(rows, now, ""):
            by_metric[name].append(line)
        text: list[str] = []
        for name, metric in self._metrics:
            if by_metric[name]:
                text += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.type}"]
                text += by_metric[name]
        return "\n".join(text) + "\n"

    def samples(self, rows: Sequence[Row], now: float, suffix: str) -> Iterator[str]:
        """Yield bare sample lines that end in `suffix` (a timestamp)."""
        return (line for _, line in self._lines(rows, now, suffix))

    def _lines(self, rows: Sequence[Row], now: float, suffix: str) -> Iterator[tuple[str, str]]:
        seen: Gpu | None = None
        values: dict[str, Value] | None = None
        for row in rows:
            if row.gpu is not seen:
                seen = row.gpu
                values = seen.values(now)
            if values is not None:
                yield from self._row_lines(row, values, now, suffix)

    def _row_lines(
        self, row: Row, values: Mapping[str, Value], now: float, suffix: str
    ) -> Iterator[tuple[str, str]]:
        share = len(row.gpu.mig)
        has_nvlink = row.gpu.model.has_nvlink
        for name, metric in self._metrics:
            if metric.needs_nvlink and not has_nvlink:
                continue
            if share and metric.on_mig is OnMig.ABSENT:
                continue
            if metric.name == XID_COUNT and XID_COUNT not in values:
                for labels, count in self._xid_counts(row, now):
                    yield name, f"{name}{{{labels}}} {count}{suffix}"
                continue
            value = values.get(metric.name)
            if value is None:
                continue
            if share and metric.on_mig is OnMig.SHARED:
                value = int(value) // share
            labels = row.plain
            if metric.name == XID_ERRORS and row.has_xid_labels:
                labels = row.labels(_xid_labels(int(value)))
            printed = f"{value:.6f}" if metric.is_ratio else value
            yield name, f"{name}{{{labels}}} {printed}{suffix}"

    def _xid_counts(self, row: Row, now: float) -> Iterator[tuple[str, int]]:
        counts = row.gpu.xid_counts(now, self._xid_window_s)
        if not counts:
            yield row.labels((self._window,)), 0
        for code, count in sorted(counts.items()):
            yield row.labels((self._window, ("xid", str(code)))), count


def _xid_labels(code: int) -> Pairs:
    return (("err_code", str(code)), ("err_msg", XID_TEXTS.get(code, "Unknown Error")))


def _head(gpu: Gpu, instance: MigInstance | None, dialect: Dialect, node: str) -> Pairs:
    pairs: list[tuple[str, str]] = [("gpu", str(gpu.index))]
    if dialect.has_uuid:
        pairs.append(("UUID", gpu.uuid))
    if dialect.has_pci_bus_id:
        pairs.append(("pci_bus_id", pci_bus_id(gpu.index)))
    pairs += [("device", f"nvidia{gpu.index}"), ("modelName", gpu.model.name)]
    if instance is not None:
        pairs += [("GPU_I_PROFILE", instance.profile), ("GPU_I_ID", str(instance.id))]
    if dialect.hostname_label is not None:
        pairs.append((dialect.hostname_label, dialect.hostname or node))
    return tuple(pairs)


def _pod_labels(pod: Pod | None) -> Pairs:
    if pod is None:
        return ()
    return (("container", pod.container), ("namespace", pod.namespace), ("pod", pod.name))


def _maker(head: Pairs, fixed: Pairs, pod: Pairs, target: Pairs) -> Callable[[Pairs], str]:
    """Return a function that prints a row's labels together with extra ones.

    The exporter prints the fixed labels, then the labels of its counters file and of the XID count,
    then attributes (pod and err_…), each group sorted.
    """
    taken = {name for name, _ in target}

    def make(extra: Pairs) -> str:
        attributes = [pair for pair in extra if pair[0].startswith("err_")]
        labels = [pair for pair in extra if not pair[0].startswith("err_")]
        own = [*head, *sorted([*fixed, *labels]), *sorted([*pod, *attributes])]
        stored = [(f"exported_{name}" if name in taken else name, value) for name, value in own]
        return label_text([*stored, *target])

    return make


def label_text(pairs: Iterable[tuple[str, str]]) -> str:
    """Print labels as they stand between the braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
