"""Fleet, exporters, Prometheus and front together."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from local.amp.exporter import ExporterApp, GpuFleet
from local.amp.front import AmpFront
from local.amp.prometheus import PrometheusServer, instances
from local.amp.serving import RunningServer, serve
from local.calls import CallLog, FaultPlan
from local.identity import Identities


class LocalAmp:
    """AMP workspaces over simulated fleets; also a context manager.

    Example:
        >>> fleet = GpuFleet("prod")
        >>> fleet.add_node("ip-10-0-1-5.ec2.internal", "p5.48xlarge")
        >>> amp = LocalAmp({"ws-1": [fleet]}, identities=Identities())
        >>> with amp:  # doctest: +SKIP
        ...     amp.wait_until_scraped()

    Args:
        workspaces: Fleets by workspace id; each workspace is a Prometheus of its own.
        identities: Who may sign queries.
        calls: See `AmpFront`.
        faults: See `AmpFront`.
        region: See `AmpFront`.
        history_s: See `PrometheusServer`; the nodes that are in the fleets at `start` have it.
        scrape_interval_s: See `PrometheusServer`.
        rule_files: See `PrometheusServer`.
        clock: Unix seconds.
    """

    def __init__(
        self,
        workspaces: Mapping[str, Sequence[GpuFleet]],
        *,
        identities: Identities,
        calls: CallLog | None = None,
        faults: FaultPlan | None = None,
        region: str = "us-east-1",
        history_s: float = 1800.0,
        scrape_interval_s: int = 1,
        rule_files: Iterable[Path] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._workspaces = workspaces
        self._history_s = history_s
        self._scrape_interval_s = scrape_interval_s
        self._rule_files = list(rule_files)
        self._clock = clock
        self._exporter = ExporterApp(workspaces)
        self._exporter_server: RunningServer | None = None
        self._front_server: RunningServer | None = None
        self._urls: dict[str, str] = {}
        self.prometheus: dict[str, PrometheusServer] = {}
        """The servers by workspace id, once started."""
        self.app = AmpFront(
            self._urls,
            identities=identities,
            calls=calls,
            faults=faults,
            region=region,
            clock=clock,
        )
        """The front as a WSGI application, to be mounted elsewhere."""

    @property
    def url(self) -> str:
        """Where the front is served, as `https://aps-workspaces.<region>…` is in production."""
        if self._front_server is None:
            raise RuntimeError("LocalAmp is not started")
        return self._front_server.url

    def start(self) -> None:
        """Start all; return when queries are answered (from the history, see `prometheus`).

        Change pods and inject faults before, or after `wait_until_scraped`. What changes a label in
        between leaves the old series of the history standing beside the new one for five minutes:
        the history cannot say that a series has ended.

        Raises:
            PrometheusError: Prometheus is missing or does not start.
        """
        try:
            self._exporter_server = serve(self._exporter)
            for workspace, fleets in self._workspaces.items():
                server = PrometheusServer(
                    fleets,
                    sd_url=f"{self._exporter_server.url}/sd/{workspace}",
                    exporter_address=f"127.0.0.1:{self._exporter_server.port}",
                    scrape_interval_s=self._scrape_interval_s,
                    history_s=self._history_s,
                    rule_files=self._rule_files,
                    clock=self._clock,
                )
                server.start()
                self.prometheus[workspace] = server
                self._urls[workspace] = server.url
            self._front_server = serve(self.app)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the servers and processes; safe to call twice."""
        if self._front_server is not None:
            self._front_server.stop()
            self._front_server = None
        for server in self.prometheus.values():
            server.stop()
        self.prometheus.clear()
        self._urls.clear()
        if self._exporter_server is not None:
            self._exporter_server.stop()
            self._exporter_server = None
        self.app.close()

    def wait_until_scraped(self, *, after: float | None = None, timeout_s: float = 20.0) -> None:
        """Return when every node of every fleet was scraped after a time (default: this call).

        Nodes that joined are there and those that left are gone then; a node whose exporter is down
        counts as scraped. Takes up to 7 s after a node joined or left.

        Raises:
            PrometheusError: names the targets that are missing or still there.
        """
        since = self._clock() if after is None else after
        for workspace, server in self.prometheus.items():
            server.wait_until_scraped(
                instances(self._exporter, workspace), after=since, timeout_s=timeout_s
            )

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
