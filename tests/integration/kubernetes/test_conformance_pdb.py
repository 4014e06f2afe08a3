"""The status of PodDisruptionBudgets in all its states, as a real controller wrote it."""

import pytest

from tests.integration.kubernetes.conformance import Server, Step, Steps, judge, run_topic
from tests.integration.kubernetes.known_differences import KNOWN_DIFFERENCES
from tests.integration.kubernetes.replay import Exchange, load
from tests.integration.kubernetes.stage import Stage

EXCHANGES = load("pdb")


def begin(stage: Stage) -> None:
    stage.node()


def front(stage: Stage) -> None:
    stage.deployment("web", "front", 3)
    stage.budget("web", "front", minAvailable=2, match="front")


def busy(stage: Stage) -> None:
    stage.deployment("web", "busy", 3, unready=1)
    stage.budget("web", "busy", minAvailable=2, match="busy")


def under(stage: Stage) -> None:
    stage.deployment("web", "under", 3, unready=2)
    stage.budget("web", "under", minAvailable=2, match="under")


def solo(stage: Stage) -> None:
    stage.deployment("ml", "solo", 1)
    stage.budget("ml", "solo", minAvailable=1, match="solo")


def frozen(stage: Stage) -> None:
    stage.deployment("ml", "frozen", 2)
    stage.budget("ml", "frozen", maxUnavailable=0, match="frozen")


def all100(stage: Stage) -> None:
    stage.deployment("ml", "all100", 2)
    stage.budget("ml", "all100", minAvailable="100%", match="all100")


def pct(stage: Stage) -> None:
    stage.deployment("ml", "pct", 7)
    stage.budget("ml", "pct", maxUnavailable="30%", match="pct")


def one(stage: Stage) -> None:
    stage.deployment("ml", "one", 1)
    stage.budget("ml", "one", maxUnavailable="1%", match="one")


def policy(stage: Stage) -> None:
    stage.budget(
        "ml", "policy", minAvailable=1, match="solo2", unhealthyPodEvictionPolicy="AlwaysAllow"
    )


def expressions(stage: Stage) -> None:
    selector = {
        "matchLabels": {"app": "frozen"},
        "matchExpressions": [
            {"key": "tier", "operator": "DoesNotExist"},
            {"key": "app", "operator": "In", "values": ["frozen", "other"]},
        ],
    }
    stage.budget("ml", "exprs", maxUnavailable=1, selector=selector)


def fresh(stage: Stage) -> None:
    stage.controls.pause("disruption")
    stage.budget("ml", "fresh", minAvailable=1, match="fresh")


def settled(step: Step) -> Step:
    def run(stage: Stage) -> None:
        step(stage)
        stage.controls.settle()

    return run


STEPS: Steps = {
    "pdb-list-empty": begin,
    "pdb-get-healthy": settled(front),
    "pdb-get-exhausted": settled(busy),
    "pdb-get-below-desired": settled(under),
    "pdb-get-never-satisfiable": settled(solo),
    "pdb-get-max-unavailable-0": settled(frozen),
    "pdb-get-min-available-100-percent": settled(all100),
    "pdb-get-min-available-above-replicas": settled(
        lambda stage: stage.budget("ml", "too-many", minAvailable=5, match="all100")
    ),
    "pdb-get-percent-max-unavailable": settled(pct),
    "pdb-get-percent-min-available": settled(
        lambda stage: stage.budget("ml", "pct-min", minAvailable="30%", match="pct")
    ),
    "pdb-get-percent-max-unavailable-single": settled(one),
    "pdb-get-no-pods": settled(
        lambda stage: stage.budget("ml", "nobody", minAvailable=1, match="nobody")
    ),
    "pdb-get-always-allow": settled(policy),
    "pdb-get-match-expressions": settled(expressions),
    "pdb-get-not-processed": fresh,
    "pdb-list-namespace": lambda stage: stage.controls.resume("disruption"),
}


@pytest.fixture(scope="module")
def results(server: Server) -> dict[str, list[str]]:
    return run_topic("pdb", STEPS, server)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_the_answer_is_the_recorded_one(exchange: Exchange, results: dict[str, list[str]]) -> None:
    judge(exchange, results[exchange.name], KNOWN_DIFFERENCES["pdb"])
