"""What the scan benchmark takes for broken, and how much history it writes."""

from typing import Any

import pytest

from benchmarks import scan, scan_fleet
from nodemend.catalogue import load_catalogue
from nodemend.domain.faults import Family


def _scanned(state: str = "healthy", **changes: Any) -> dict[str, Any]:
    """What the scan benchmark measures of one fleet, in the parts that it judges."""
    sick = state == "sick"
    family = {
        "queries": 2,
        "samples_by_rule": {"a": 1, "b": 1},
        "findings": 16 if sick else 0,
        "gpus": 16 if sick else 0,
        "rules": ["a"] if sick else [],
        "per_gpu_minute": 60.0,
        "ratio": 1.3 if sick else 1.05,
        "peak_mib": 256.0,
        "scan_s": 1.5,
    }
    families = dict.fromkeys(Family, family | changes)
    return {"nodes": 2, "gpus": 16, "state": state, "families": families}


def test_a_scan_that_does_as_it_must_is_not_broken() -> None:
    for state in ("healthy", "sick"):
        scan.judge(_scanned(state), is_sick=state == "sick")
        assert all(goal["met"] for goal in scan.goals(_scanned(state)))
    scan.check_constant([_scanned("healthy"), _scanned("sick")])


@pytest.mark.parametrize(
    ("state", "changes", "said"),
    [
        ("healthy", {"findings": 1, "rules": ["a"]}, "1 findings in a healthy fleet, of a"),
        ("sick", {"findings": 15}, "15 findings of 16 sick GPUs"),
        ("sick", {"gpus": 15}, "15 of 16 sick GPUs were announced"),
        ("healthy", {"queries": 3}, "3 queries for 2 rules"),
    ],
)
def test_a_scan_that_misses_or_invents_is_broken(
    state: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(scan.Broken, match=said):
        scan.judge(_scanned(state, **changes), is_sick=state == "sick")


def test_queries_that_grow_with_the_fleet_are_found() -> None:
    with pytest.raises(scan.Broken, match="between 2 and 4 queries"):
        scan.check_constant([_scanned(), _scanned(queries=4)])


def test_a_goal_that_is_missed_is_named() -> None:
    slow = scan.goals(_scanned(scan_s=3.1, ratio=1.06, per_gpu_minute=60.1))
    missed = [goal["goal"] for goal in slow if not goal["met"]]
    assert missed == [
        "ecc: samples per GPU and minute",
        "ecc: ratio to the bare queries",
        "thermal: ratio to the bare queries",
        "utilization: ratio to the bare queries",
        "ecc: scan (s)",
        "all families, one after the other (s)",
    ]


def test_history_is_as_long_as_the_queries_look_back() -> None:
    queries = [
        "min_over_time(DCGM_A[5m:30s]) unless DCGM_A offset 300s",
        "max_over_time(DCGM_B[30m:60s])",
        "DCGM_C - DCGM_C offset 1d",
    ]
    metrics = ["DCGM_A", "DCGM_B", "DCGM_C", "DCGM_D"]
    islands, near = scan_fleet.pieces(metrics, queries, 100_000.0)

    assert [(piece.end - piece.start, piece.metrics) for piece in islands] == [(90.0, ("DCGM_C",))]
    assert islands[0].start < 100_000 - 86400 < islands[0].end
    assert [(100_000 - piece.start, piece.metrics) for piece in near] == [
        (1860.0, ("DCGM_B",)),
        (660.0, ("DCGM_A", "DCGM_B")),
        (60.0, ("DCGM_A", "DCGM_B", "DCGM_C", "DCGM_D")),
    ]
    assert [piece.end for piece in near] == [
        near[1].start - scan_fleet.STEP_S,
        near[2].start - scan_fleet.STEP_S,
        100_000,
    ]


def test_recordings_come_after_those_that_they_read() -> None:
    first = scan_fleet.Recording("nodemend:gpu:a", "DCGM_A", 300, "g")
    second = scan_fleet.Recording("nodemend:job:b", "max(nodemend:gpu:a)", 300, "g")
    load = scan_fleet.Workload(
        {family: {"rule": "nodemend:job:b > 1"} for family in Family}, (second, first), {}
    )
    assert list(load.levels()) == [[first], [second]]
    assert load.read_by(Family.ECC) == {"nodemend:gpu:a", "nodemend:job:b"}


def test_the_schedules_are_those_of_the_template() -> None:
    template = (scan_fleet.ROOT / "template.yaml").read_text()
    load = scan_fleet.workload(load_catalogue(), template)
    assert load.period_s == {Family.ECC: 60, Family.THERMAL: 120, Family.UTILIZATION: 300}
