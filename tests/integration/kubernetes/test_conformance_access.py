"""Access reviews and refusals, as a real API server answered them."""

import pytest

from tests.integration.kubernetes.conformance import Server, Step, Steps, judge, run_topic
from tests.integration.kubernetes.known_differences import KNOWN_DIFFERENCES
from tests.integration.kubernetes.replay import Exchange, load
from tests.integration.kubernetes.stage import Stage

EXCHANGES = load("access")


def granted(is_granted: bool) -> Step:
    return lambda stage: stage.controls.grant(is_granted)


def begin(stage: Stage) -> None:
    stage.node()
    stage.pod("ml", "p")


def administrator(stage: Stage) -> None:
    stage.api.tokens["valid-token"] = stage.api.tokens["admin"]


STEPS: Steps = {
    "ssar-patch-nodes-allowed": begin,
    "ssar-patch-nodes-allowed-by-role": granted(True),
    "ssar-non-resource": granted(False),
    "node-get-valid-token": administrator,
}


@pytest.fixture(scope="module")
def results(server: Server) -> dict[str, list[str]]:
    return run_topic("access", STEPS, server)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_the_answer_is_the_recorded_one(exchange: Exchange, results: dict[str, list[str]]) -> None:
    judge(exchange, results[exchange.name], KNOWN_DIFFERENCES["access"])
