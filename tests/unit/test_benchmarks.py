"""The benchmarks judge what they measure: a rail that does not hold is their exit status."""

import json
from typing import Any

import pytest

from benchmarks import storm
from nodemend.domain.policy import BreakerLimits, Limits, MaxUnavailable
from tests.unit.application.stage import enforce


def test_the_storm_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert storm.main(["--nodes", "60"]) == 0

    result: Any = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["storm"]["waiting"] == {"breaker_open": 60}
    assert (result["storm"]["admitted"], result["storm"]["critical_events"]) == (0, 1)
    assert result["share"]["admitted"] == result["share"]["sick"] == 3
    assert result["share"]["most_held_at_once"] <= result["share"]["budget"]


def test_a_storm_that_gets_through_is_found() -> None:
    loose = Limits(MaxUnavailable(5, 100), breaker=BreakerLimits(100, 2000))
    stage_policy = enforce(limits=loose)
    result = storm.share(100, 10, stage_policy)
    assert result["most_held_at_once"] <= 5
    with pytest.raises(storm.Broken, match="were admitted in a storm"):
        storm.storm(1, stage_policy)  # one node is no fleet: nothing opens the breaker
