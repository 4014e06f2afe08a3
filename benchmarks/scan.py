"""What a scan costs: queries, samples, time and memory at 250, 1,000 and 2,000 nodes of 8 GPUs.

`make bench-scan`. A real Prometheus holds the history of a simulated fleet; the product's scan asks
it through the emulated front of AMP, in a process of its own. All is measured twice: with a healthy
fleet, and with every GPU an offender in each family.

- Samples are what Prometheus counts as `totalQueryableSamples`, which AMP bills. Those of the
  recording rules are counted too: each is evaluated once and counted as often as it runs.
- The time is compared with the same queries sent unsigned and side by side straight to Prometheus,
  whose answers nobody parses: medians of alternated pairs.
- "own" is the computing time of the function's process for a scan: the rest it waits for AMP, whose
  share shows in the queries' times one after the other.
- The memory is the peak of a process that has scanned once, with all that the function imports.

Broken, with exit status 1, is: a number of queries that grows with the fleet, an offender that is
not found, a finding in a healthy fleet. A goal that is missed is said, and no failure: times are
those of the machine. The last line is JSON.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import urllib3
from werkzeug.wrappers import Response

from benchmarks import scan_fleet
from benchmarks.scan_fleet import GPUS_PER_NODE, Piece, Recording, Workload
from benchmarks.scan_function import Job
from local.amp.exposition import label_text
from local.amp.front import AmpFront
from local.amp.prometheus import PrometheusServer
from local.amp.serving import serve
from local.calls import CallLog
from local.identity import Identities
from nodemend.catalogue import load_catalogue
from nodemend.domain.faults import Family

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

SIZES = (250, 1000, 2000)
PAIRS = 9
REGION = "us-east-1"
WORKSPACE = "ws-bench"
USD_PER_BILLION_SAMPLES = 0.10
PRICE_SOURCE = (
    "USD 0.10 per billion query samples processed, us-east-1, as aws.amazon.com/prometheus/pricing"
    " is quoted by others (read 2026-11); without the free tier"
)
MONTH_S = 30 * 86400
_CHILD_TIMEOUT_S = 1800
_RECORDED_WITHIN_S = 90
_OUT_OF_ORDER = "8d"

GOAL_RATIO = {"healthy": 1.05, "sick": 1.3}
GOAL_ECC_SAMPLES = 60.0
GOAL_MEMORY_MIB = 256.0
GOAL_ECC_S = 3.0
GOAL_ALL_S = 5.0
GOAL_NODES = 2000
"""The goals for times are about 16,000 GPUs; smaller fleets are shown."""


class Broken(Exception):  # noqa: N818 - a verdict of the benchmark, not an error of the product
    """The scan found what it must not, missed what it must find, or asked too often."""


class _Feeder:
    """Serves what Prometheus is to hold in memory, as pages with the times of the samples.

    `/parts/<n>` is the history of a part of the fleet, until Prometheus has it; `/recorded` are
    recorded series. AMP holds the last two hours in memory as well, and blocks on disk are several
    times slower to read.
    """

    def __init__(self, part: Callable[[int], Iterable[str]]) -> None:
        self._part = part
        self._lock = threading.Lock()
        self.taken: set[int] = set()
        self.recorded: list[str] = []

    def __call__(
        self, environ: "WSGIEnvironment", start_response: "StartResponse"
    ) -> Iterable[bytes]:
        path = str(environ["PATH_INFO"])
        kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
        return Response(self._text(path), content_type=kind)(environ, start_response)

    def _text(self, path: str) -> str:
        lines: Iterable[str] = self.recorded
        if path.startswith("/parts/"):
            number = int(path.removeprefix("/parts/"))
            lines = () if number in self.taken else self._part(number)
        with self._lock:  # one page at a time: more would only be more memory
            return "\n".join([*lines, "# EOF"]) + "\n"


@dataclass(frozen=True, slots=True)
class Site:
    """A running fleet."""

    prometheus: str
    front: str
    calls: CallLog
    identities: Identities
    workload: Workload
    at: float
    recorded: Mapping[str, Mapping[str, float]]
    """Samples of one evaluation and series, by record."""
    start_s: float
    samples_written: int

    def job(self, family: Family, pairs: int) -> Job:
        """Return a job for a function's process."""
        key = self.identities.issue("scan_gpu_health")
        return Job(
            front=self.front,
            prometheus=self.prometheus,
            region=REGION,
            workspace=WORKSPACE,
            cluster=scan_fleet.CLUSTER,
            access_key_id=key.access_key_id,
            secret_access_key=key.secret_access_key,
            session_token=key.session_token or "",
            at=self.at,
            family=family,
            queries=self.workload.queries[family],
            pairs=pairs,
        )


@contextmanager
def site(nodes: int, *, is_sick: bool, now: float) -> Iterator[Site]:
    """Write a fleet's history, start Prometheus and AMP's front over it, and end both.

    Raises:
        PrometheusError: if Prometheus is missing or does not start.
        Broken: if the history or recorded series do not arrive.
    """
    began = time.perf_counter()
    catalogue = load_catalogue()
    load = scan_fleet.workload(catalogue, (scan_fleet.ROOT / "template.yaml").read_text())
    metrics, _ = scan_fleet.exported_metrics(catalogue)
    end = scan_fleet.last_scrape(now)
    islands, near = scan_fleet.pieces(metrics, load.texts(), end)
    parts = scan_fleet.parts(nodes)
    per_gpu = sum(
        ((piece.end - piece.start) // scan_fleet.STEP_S + 1) * len(piece.metrics)
        for piece in (*islands, *near)
    )

    def write(numbers: range, pieces: Iterable[Piece]) -> Iterator[str]:
        for piece in pieces:
            yield from scan_fleet.history(piece, numbers, are_sick=is_sick, end=end)

    def island(piece: Piece) -> Iterator[str]:
        for numbers in parts:
            yield from write(numbers, [piece])

    feeder = _Feeder(lambda number: write(parts[number], near))
    identities, calls, urls = Identities(), CallLog(), {WORKSPACE: ""}
    front = AmpFront(urls, identities=identities, calls=calls, region=REGION)
    with (
        serve(feeder) as feeder_server,
        serve(front) as front_server,
        PrometheusServer(
            [],
            sd_url="",
            exporter_address="",
            history_s=0,
            past=map(island, islands),
            retention_h=24 * 30,
            more_config=_config(feeder_server.port, len(parts)),
        ) as server,
    ):
        urls[WORKSPACE] = server.url
        _wait_for_parts(server.url, feeder, len(parts))
        recorded = _record(server.url, feeder, load, end)
        yield Site(
            prometheus=server.url,
            front=front_server.url,
            calls=calls,
            identities=identities,
            workload=load,
            at=end + scan_fleet.TELEMETRY_AGE_S,
            recorded=recorded,
            start_s=time.perf_counter() - began,
            samples_written=int(per_gpu * nodes * GPUS_PER_NODE),
        )
    front.close()


def _config(port: int, parts: int) -> dict[str, Any]:
    """Return what lets Prometheus take samples of the past, with their labels as they are."""
    # Prometheus spreads the first scrapes over the interval.
    interval = f"{max(3, parts * 2 // 3)}s"

    def job(name: str, interval: str, paths: list[str]) -> dict[str, Any]:
        return {
            "job_name": name,
            "honor_labels": True,
            "honor_timestamps": True,
            "scrape_interval": interval,
            "scrape_timeout": interval,
            "static_configs": [
                {"targets": [f"127.0.0.1:{port}"], "labels": {"__metrics_path__": path}}
                for path in paths
            ],
        }

    return {
        "storage": {"tsdb": {"out_of_order_time_window": _OUT_OF_ORDER}},
        "scrape_configs": [
            job("parts", interval, [f"/parts/{number}" for number in range(parts)]),
            job("recorded", "3s", ["/recorded"]),
        ],
    }


def _wait_for_parts(url: str, feeder: _Feeder, parts: int) -> None:
    deadline = time.monotonic() + 60 + 6 * parts
    while len(feeder.taken) < parts:
        if time.monotonic() > deadline:
            raise Broken(f"Prometheus has taken {len(feeder.taken)} of {parts} parts of the fleet")
        time.sleep(0.5)
        answer = _HTTP.request("GET", f"{url}/api/v1/targets?state=active", timeout=60)
        for target in answer.json()["data"]["activeTargets"]:
            path = str(target["discoveredLabels"]["__metrics_path__"])
            if target["health"] == "up" and path.startswith("/parts/"):
                feeder.taken.add(int(path.removeprefix("/parts/")))


def _record(url: str, feeder: _Feeder, load: Workload, end: float) -> dict[str, dict[str, float]]:
    """Evaluate the recordings in their order, and store each as if it had always been so."""
    found: dict[str, dict[str, float]] = {}
    for level in load.levels():
        lines: list[str] = []
        expected = 0
        for one in level:
            data = _ask(url, one.expression, end + scan_fleet.TELEMETRY_AGE_S)
            rows = data["result"]
            found[one.record] = {"samples": _samples_of(data), "series": len(rows)}
            expected += len(rows)
            lines += _lines(one, rows, end, _points(one, load))
        if not lines:
            continue
        feeder.recorded = lines
        names = "|".join(one.record for one in level)
        deadline = time.monotonic() + _RECORDED_WITHIN_S
        while _count(url, f'count({{__name__=~"{names}"}})', end) != expected:
            if time.monotonic() > deadline:
                raise Broken(f"{expected} recorded series of {names} did not arrive")
            time.sleep(0.5)
        feeder.recorded = []
    return found


def _points(recording: Recording, load: Workload) -> int:
    reaches = [
        scan_fleet.reach_of(text)
        for text in load.texts()
        if recording.record in text and text != recording.expression
    ]
    window_s = max((max([r.near, *r.cut]) for r in reaches), default=0.0)
    return int(window_s // recording.interval_s) + 1


def _lines(
    recording: Recording, rows: Sequence[Mapping[str, Any]], end: float, points: int
) -> Iterator[str]:
    for row in rows:
        labels = label_text(
            (name, value) for name, value in row["metric"].items() if name != "__name__"
        )
        for number in reversed(range(points)):
            stamp = end - number * recording.interval_s
            yield f"{recording.record}{{{labels}}} {row['value'][1]} {stamp:.3f}"


_HTTP = urllib3.PoolManager()


def _ask(url: str, query: str, at: float) -> dict[str, Any]:
    answer = _HTTP.request(
        "POST",
        f"{url}/api/v1/query",
        fields={"query": query, "time": f"{at:.3f}", "stats": "all"},
        encode_multipart=False,
        timeout=120,
        retries=False,
    ).json()
    if answer["status"] != "success":
        raise Broken(f"Prometheus refused {query}: {answer.get('error')}")
    data: dict[str, Any] = answer["data"]
    return data


def _samples_of(data: Mapping[str, Any]) -> int:
    return int(data["stats"]["samples"]["totalQueryableSamples"])


def _count(url: str, query: str, at: float) -> int:
    rows = _ask(url, query, at)["result"]
    return int(float(rows[0]["value"][1])) if rows else 0


def _function(job: Job) -> dict[str, Any]:
    """Run a job in a process of its own, as Lambda does."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scan_function"],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        check=False,
        timeout=_CHILD_TIMEOUT_S,
        cwd=scan_fleet.ROOT,
    )
    if done.returncode != 0:
        raise Broken(f"the function's process ended with {done.returncode}: {done.stderr[-500:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def measure(nodes: int, *, is_sick: bool, pairs: int, now: float) -> dict[str, Any]:
    """Measure one fleet in one state of health.

    Raises:
        Broken: if an offender is missed, or a healthy fleet has findings.
    """
    with site(nodes, is_sick=is_sick, now=now) as place:
        families = {family: _family(place, family, nodes, pairs) for family in Family}
        gpus = nodes * GPUS_PER_NODE
        result = {
            "nodes": nodes,
            "gpus": gpus,
            "state": "sick" if is_sick else "healthy",
            "started_s": round(place.start_s, 1),
            "samples_written": place.samples_written,
            "load": os.getloadavg()[0],
            "recordings": {
                one.record: {
                    **place.recorded[one.record],
                    "interval_s": one.interval_s,
                    "per_gpu_minute": round(
                        place.recorded[one.record]["samples"] / gpus * 60 / one.interval_s, 3
                    ),
                }
                for one in place.workload.recordings
            },
            "families": families,
            "month": _month(place, families),
        }
    judge(result, is_sick=is_sick)
    return result


def _queries(place: Site) -> int:
    return sum(call.verb == "query" for call in place.calls.calls())


def _family(place: Site, family: Family, nodes: int, pairs: int) -> dict[str, Any]:
    # Memory first, in a process that does nothing else: what the pairs keep is not the scan's.
    before = _queries(place)
    lone = _function(place.job(family, 0))
    queries = _queries(place) - before
    many = _function(place.job(family, pairs))
    gpus = nodes * GPUS_PER_NODE
    period_s = place.workload.period_s[family]
    samples = sum(many["samples"].values())
    recorded = sum(
        place.recorded[one.record]["samples"] * 60 / one.interval_s
        for one in place.workload.recordings
        if one.record in place.workload.read_by(family)
    )
    scan_s, bare_s = statistics.median(many["scan_s"]), statistics.median(many["bare_s"])
    ratios = [scan / bare for scan, bare in zip(many["scan_s"], many["bare_s"], strict=True)]
    return {
        "period_s": period_s,
        "queries": queries,
        "samples": samples,
        "samples_by_rule": many["samples"],
        "samples_per_gpu": round(samples / gpus, 2),
        "recorded_per_gpu_minute": round(recorded / gpus, 2),
        "per_gpu_minute": round(samples / gpus * 60 / period_s + recorded / gpus, 2),
        "answer_bytes": many["answer_bytes"],
        "scan_s": round(scan_s, 3),
        "bare_s": round(bare_s, 3),
        "ratio": round(statistics.median(ratios), 3),
        "first_scan_s": round(lone["first_scan_s"], 3),
        "own_s": round(statistics.median(many["own_s"]), 3),
        "alone_s": {key: round(took_s, 3) for key, took_s in many["alone_s"].items()},
        "peak_mib": round(lone["peak_mib"], 1),
        **{
            name: lone[name]
            for name in ("findings", "unknown_rules", "announced", "rules", "gpus", "blind")
        },
    }


def _month(place: Site, families: Mapping[Family, Mapping[str, Any]]) -> dict[str, Any]:
    scans = sum(one["samples"] * MONTH_S / one["period_s"] for one in families.values())
    recordings = sum(
        place.recorded[one.record]["samples"] * MONTH_S / one.interval_s
        for one in place.workload.recordings
    )
    sight = _samples_of(_ask(place.prometheus, place.workload.sight, place.at)) * MONTH_S / 3600
    price = USD_PER_BILLION_SAMPLES / 1e9
    return {
        "scan_samples": int(scans),
        "recording_samples": int(recordings),
        "sight_samples": int(sight),
        "scan_usd": round(scans * price, 2),
        "recording_usd": round(recordings * price, 2),
        "sight_usd": round(sight * price, 2),
        "usd": round((scans + recordings + sight) * price, 2),
    }


def judge(result: Mapping[str, Any], *, is_sick: bool) -> None:
    """Check what must hold on every machine.

    Raises:
        Broken: if an offender is missed, or a healthy fleet has findings, or queries are repeated.
    """
    for family, one in result["families"].items():
        if one["queries"] != len(one["samples_by_rule"]):
            raise Broken(
                f"{family}: {one['queries']} queries for {len(one['samples_by_rule'])} rules"
            )
        if not is_sick and one["findings"]:
            raise Broken(
                f"{family}: {one['findings']} findings in a healthy fleet, of"
                f" {', '.join(one['rules']) or 'rules that are not reported'}"
            )
        if is_sick and one["findings"] < result["gpus"]:
            raise Broken(f"{family}: {one['findings']} findings of {result['gpus']} sick GPUs")
        # What a job does is counted, not announced; such findings name no GPU here.
        if is_sick and family is not Family.UTILIZATION and one["gpus"] != result["gpus"]:
            raise Broken(f"{family}: {one['gpus']} of {result['gpus']} sick GPUs were announced")


def check_constant(results: Sequence[Mapping[str, Any]]) -> None:
    """Compare the numbers of queries of all fleets.

    Raises:
        Broken: if they differ between sizes or states.
    """
    for family in Family:
        numbers = {one["families"][family]["queries"] for one in results}
        if len(numbers) > 1:
            raise Broken(f"{family}: between {min(numbers)} and {max(numbers)} queries by size")


def goals(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each goal with what was measured, and whether it is met."""
    families, state = result["families"], result["state"]
    measured: list[tuple[str, float, float]] = [
        (
            "ecc: samples per GPU and minute",
            families[Family.ECC]["per_gpu_minute"],
            GOAL_ECC_SAMPLES,
        )
    ]
    for family, one in families.items():
        measured += [
            (f"{family}: ratio to the bare queries", one["ratio"], GOAL_RATIO[state]),
            (f"{family}: peak memory (MiB)", one["peak_mib"], GOAL_MEMORY_MIB),
        ]
    every = round(sum(one["scan_s"] for one in families.values()), 3)
    measured += [
        ("ecc: scan (s)", families[Family.ECC]["scan_s"], GOAL_ECC_S),
        ("all families, one after the other (s)", every, GOAL_ALL_S),
    ]
    return [
        {"goal": name, "measured": value, "at_most": limit, "met": value <= limit}
        for name, value, limit in measured
    ]


def _print(result: Mapping[str, Any]) -> None:
    title = f"{result['nodes']} nodes, {result['gpus']} GPUs, {result['state']}"
    print(
        f"\n{title}: {result['samples_written']:,} samples of history in {result['started_s']} s,"
        f" load {result['load']:.1f}"
    )
    head = "family       queries  samples/scan  per GPU  per GPU·min  answer kB"
    print(f"  {head}  scan s   own s  bare s  ratio  peak MiB  findings")
    for family, one in result["families"].items():
        times = " ".join(f"{one[name]:>7.3f}" for name in ("scan_s", "own_s", "bare_s"))
        print(
            f"  {family:<12} {one['queries']:>7} {one['samples']:>13,} {one['samples_per_gpu']:>8}"
            f" {one['per_gpu_minute']:>12} {one['answer_bytes'] / 1e3:>10,.1f} {times}"
            f" {one['ratio']:>6.2f} {one['peak_mib']:>9.1f} {one['findings']:>9,}"
        )
        slowest = sorted(one["alone_s"].items(), key=lambda pair: -pair[1])[:3]
        print(
            f"    one query after the other {sum(one['alone_s'].values()):.3f} s, the slowest"
            f" {', '.join(f'{rule_id} {took_s}' for rule_id, took_s in slowest)}"
        )
        for rule_id, why in one["blind"].items():
            print(f"    unknown: {rule_id}: {why}")
    if result["recordings"]:
        total = sum(one["per_gpu_minute"] for one in result["recordings"].values())
        print(f"  recording rules: {total:.2f} samples per GPU and minute, of which")
        for name, one in result["recordings"].items():
            print(
                f"    {name}: {one['per_gpu_minute']} (every {one['interval_s']} s,"
                f" {one['series']:,} series)"
            )
    month = result["month"]
    print(
        f"  AMP per month: USD {month['usd']:.2f} for queries (scans {month['scan_usd']:.2f},"
        f" recording rules {month['recording_usd']:.2f}, what is exported"
        f" {month['sight_usd']:.2f})"
    )
    for one in result["goals"]:
        if not one["met"]:
            where = "" if result["nodes"] == GOAL_NODES else f" (a goal for {GOAL_NODES} nodes)"
            print(f"  NOT MET: {one['goal']}: {one['measured']}, at most {one['at_most']}{where}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all sizes; returns 1 if the scan is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scan", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(SIZES), help="sizes of fleets")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="alternated pairs per median")
    options = parser.parse_args(arguments)
    if min(*options.nodes, options.pairs) < 1:
        parser.error("--nodes and --pairs are at least 1")
    catalogue = load_catalogue()
    metrics, source = scan_fleet.exported_metrics(catalogue)
    print(f"{len(catalogue.rules)} rules; {len(metrics)} metrics per GPU, from {source}")
    print(f"price: {PRICE_SOURCE}")
    results: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"benchmark": "scan", "price": PRICE_SOURCE, "results": results}
    try:
        for nodes in options.nodes:
            for is_sick in (False, True):
                result = measure(nodes, is_sick=is_sick, pairs=options.pairs, now=time.time())
                result["goals"] = goals(result)
                results.append(result)
                _print(result)
        check_constant(results)
    except Broken as error:
        summary["broken"] = str(error)
        print(f"BROKEN: {error}")
    summary["unmet"] = sum(not goal["met"] for one in results for goal in one["goals"])
    print(json.dumps(summary))
    return 1 if "broken" in summary else 0


if __name__ == "__main__":
    # What was started is ended, and gigabytes are removed, also when we are told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
