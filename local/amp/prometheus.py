"""A real Prometheus on a free loopback port, with a past.

The history is written before the start with `promtool tsdb create-blocks-from openmetrics` from the
same fleet model that is scraped afterwards: windows of minutes or hours hold at once. It ends
before the process starts, hence before the first scrape, and its labels are the scraped ones, so
that no GPU stands there twice at the seam.

Two delays belong to Prometheus itself and no setting shortens them: it looks at its discovered
targets every 5 s, so the first scrape comes 5 to 6 s after the start, and a node that joins is
scraped after at most 7 s (1 s discovery, 5 s, 1 s scrape). Until the first scrape, queries are
answered from the history.
"""

import atexit
import contextlib
import itertools
import math
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import urllib3
import yaml

from local.amp.exporter import JOB, ExporterApp, GpuFleet

_BLOCK_S = 7200
"""promtool cuts blocks at even two hours, and reads its whole input once for each."""
_START_ATTEMPTS = 5
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0

# Prometheus ends, and its files go, when the standard input of this shell does: on stop(), and also
# when our process is killed in a way that runs no exit handler. `cat` waits for that end.
_SUPERVISOR = """
directory=$1
shift
exec 3<&0
"$@" </dev/null 3<&- &
child=$!
( cat <&3 >/dev/null; : >"$directory/stopping"; kill "$child" 2>/dev/null ) &
watcher=$!
exec 3<&-
wait "$child"
status=$?
if [ -e "$directory/stopping" ]; then rm -rf "$directory"; fi
kill "$watcher" 2>/dev/null
exit "$status"
"""


class PrometheusError(Exception):
    """Prometheus is not installed, does not start, or does not become ready."""


class PrometheusServer:
    """Runs Prometheus over the exporters of some fleets; also a context manager.

    Args:
        fleets: What is backfilled. Nodes that join later have no history.
        sd_url: Address of the discovery list (`/sd/<group>` of an `ExporterApp`); empty: no
            exporter is scraped.
        exporter_address: `host:port` at which every exporter page is really served.
        scrape_interval_s: At least 1 in practice: Prometheus takes whole seconds here.
        history_s: Length of the history; 0 for none.
        history_step_s: Interval of its samples, AMP's usual 30 s.
        rule_files: Recording and alerting rules to load.
        rule_interval_s: How often they are evaluated.
        query_timeout_s: AMP ends a query after a minute.
        external_labels: As in Prometheus' configuration.
        past: History that is not the fleets' own: OpenMetrics lines, each piece within one even
            stretch of two hours and none within the time of another. It is written before the
            fleets' history.
        retention_h: How long before its newest sample Prometheus keeps any; default: the history
            and a day.
        more_config: Sections that are added to the configuration; its `scrape_configs` come after
            the exporters'.
    """

    def __init__(
        self,
        fleets: Sequence[GpuFleet],
        *,
        sd_url: str,
        exporter_address: str,
        scrape_interval_s: int = 1,
        history_s: float = 1800.0,
        history_step_s: float = 30.0,
        rule_files: Iterable[Path] = (),
        rule_interval_s: int = 1,
        query_timeout_s: int = 60,
        external_labels: dict[str, str] | None = None,
        past: Iterable[Iterable[str]] = (),
        retention_h: int | None = None,
        more_config: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleets = fleets
        self._past = past
        self._retention_h = retention_h or max(24, int(history_s / 1800))
        self._more_config = more_config or {}
        self._sd_url = sd_url
        self._exporter_address = exporter_address
        self._scrape_interval_s = scrape_interval_s
        self._history_s = history_s
        self._history_step_s = history_step_s
        self._rule_files = [str(path.resolve()) for path in rule_files]
        self._rule_interval_s = rule_interval_s
        self._query_timeout_s = query_timeout_s
        self._external_labels = external_labels or {}
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._http = urllib3.PoolManager(maxsize=8)
        self.url = ""
        """`http://127.0.0.1:port` once started."""
        self.history_end = 0.0
        """Unix seconds of the last backfilled sample; 0 without history."""

    def start(self) -> None:
        """Write the history, start the process, and return when it answers queries.

        Raises:
            PrometheusError: with the remedy or the last lines of the log in its message.
        """
        if self._process is not None:
            raise PrometheusError("Prometheus is running already")
        prometheus, promtool = _tool("prometheus"), _tool("promtool")
        self._directory = Path(tempfile.mkdtemp(prefix="nodemend-amp-"))
        atexit.register(self.stop)
        try:
            self._configure()
            for lines in self._past:
                self._write_block(promtool, lines)
            if self._history_s > 0:
                self._backfill(promtool)
            self._launch_somewhere(prometheus)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the process and remove its files; safe to call twice."""
        self._end_process()
        self._http.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        atexit.unregister(self.stop)

    @property
    def pid(self) -> int | None:
        """Process id of the supervising shell, whose only child is Prometheus."""
        return None if self._process is None else self._process.pid

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Evaluate an instant query directly, past the AMP front; for tests and waiting."""
        fields = {"query": expression}
        if at is not None:
            fields["time"] = f"{at:.3f}"
        answer = self._http.request(
            "POST", f"{self.url}/api/v1/query", fields=fields, encode_multipart=False, timeout=30
        )
        document = answer.json()
        if document["status"] != "success":
            raise PrometheusError(f"{document.get('errorType')}: {document.get('error')}")
        result: list[dict[str, Any]] = document["data"]["result"]
        return result

    def wait_until_scraped(
        self, instances: Iterable[tuple[str, str]], *, after: float, timeout_s: float = 20.0
    ) -> None:
        """Return when exactly these targets were scraped at or after a time, failing ones included.

        Args:
            instances: (cluster label or "", instance) of each target that must be there.
            after: Unix seconds; a sample of `up` from before does not count.
            timeout_s: Then the wait fails.

        Raises:
            PrometheusError: names what is missing or still there.
        """
        wanted = set(instances)
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.query(f'timestamp(up{{job="{JOB}"}})')
            fresh = {_instance(row) for row in found if float(row["value"][1]) >= after}
            known = {_instance(row) for row in found}
            if fresh == wanted == known:
                return
            if time.monotonic() > deadline:
                raise PrometheusError(
                    f"not scraped within {timeout_s:g} s: {sorted(wanted - fresh)[:5]};"
                    f" still there: {sorted(known - wanted)[:5]}"
                )
            time.sleep(0.1)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # --- steps of the start

    def _configure(self) -> None:
        exporters = {
            "job_name": JOB,
            "honor_labels": False,
            "http_sd_configs": [{"url": self._sd_url, "refresh_interval": "1s"}],
            "relabel_configs": [
                {"source_labels": ["__address__"], "target_label": "instance"},
                {"target_label": "__address__", "replacement": self._exporter_address},
            ],
        }
        more = dict(self._more_config)
        document = {
            "global": {
                "scrape_interval": f"{self._scrape_interval_s}s",
                "scrape_timeout": f"{self._scrape_interval_s}s",
                "evaluation_interval": f"{self._rule_interval_s}s",
                "external_labels": self._external_labels,
            },
            "rule_files": self._rule_files,
            "scrape_configs": [
                *([exporters] if self._sd_url else []),
                *more.pop("scrape_configs", []),
            ],
            **more,
        }
        path = self._place() / "prometheus.yml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))

    def _backfill(self, promtool: str) -> None:
        # Whole seconds: the last sample is in the past when the process starts.
        end = math.floor(self._clock())
        start = end - self._history_s
        self.history_end = float(end)
        for low, high in _pieces(start, end, self._history_step_s):
            self._write_block(
                promtool,
                itertools.chain.from_iterable(
                    fleet.history(low, high, self._history_step_s) for fleet in self._fleets
                ),
            )

    def _write_block(self, promtool: str, lines: Iterable[str]) -> None:
        path = self._place() / "history.txt"
        rest = iter(lines)
        with path.open("w", encoding="utf-8") as file:
            while chunk := "\n".join(itertools.islice(rest, 5000)):
                file.write(chunk + "\n")
            file.write("# EOF\n")
        done = subprocess.run(
            [
                promtool,
                "tsdb",
                "create-blocks-from",
                "openmetrics",
                "-q",
                str(path),
                str(self._place() / "data"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise PrometheusError(f"promtool could not write the history: {done.stderr[-500:]}")
        path.unlink()

    def _launch_somewhere(self, prometheus: str) -> None:
        for _ in range(_START_ATTEMPTS):
            if self._launch(prometheus):
                return
        raise PrometheusError(f"Prometheus found no free port: {self._log_tail()}")

    def _launch(self, prometheus: str) -> bool:
        """Start the process; False if another one took the port in between."""
        port = _free_port()
        log = self._place() / "prometheus.log"
        command = [
            prometheus,
            f"--config.file={self._place() / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._place() / 'data'}",
            f"--storage.tsdb.retention.time={self._retention_h}h",
            f"--query.timeout={self._query_timeout_s}s",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["sh", "-c", _SUPERVISOR, "sh", str(self._place()), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal reaches us, and we stop it after its readers.
                start_new_session=True,
            )
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                text = self._log_tail()
                self._end_process()
                if "address already in use" in text:
                    return False
                raise PrometheusError(f"Prometheus ended at once: {text}")
            if self._is_ready():
                return True
            time.sleep(0.02)
        raise PrometheusError(f"Prometheus was not ready in time: {self._log_tail()}")

    def _is_ready(self) -> bool:
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            answer = self._http.request("GET", f"{self.url}/-/ready", retries=False, timeout=2)
            return answer.status == 200
        return False

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # The session is ours alone: shell, cat and Prometheus.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _place(self) -> Path:
        if self._directory is None:
            raise PrometheusError("Prometheus is not started")
        return self._directory

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self._place() / "prometheus.log").read_text(errors="replace").splitlines()
            return " | ".join(lines[-3:])
        return "no log"


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PrometheusError(
            f"{name} is not on the PATH: install Prometheus"
            " (Debian and Ubuntu: apt install prometheus; macOS: brew install prometheus)"
        )
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _pieces(start: float, end: float, step_s: float) -> list[tuple[float, float]]:
    """Cut a grid of samples that ends at `end` at the borders of promtool's blocks."""
    first = end - math.floor((end - start) / step_s) * step_s
    pieces: list[tuple[float, float]] = []
    low = first
    while low <= end:
        border = (math.floor(low / _BLOCK_S) + 1) * _BLOCK_S
        steps = math.ceil((min(border, end + step_s) - low) / step_s)
        pieces.append((low, low + (steps - 1) * step_s))
        low += steps * step_s
    return pieces


def _instance(row: dict[str, Any]) -> tuple[str, str]:
    return row["metric"].get("cluster", ""), row["metric"]["instance"]


def instances(app: ExporterApp, group: str) -> list[tuple[str, str]]:
    """Return what `wait_until_scraped` needs to know of the targets that are listed now."""
    return [(t.labels.get("cluster", ""), t.address) for t in app.targets(group)]
