"""Reading, patching, tainting and deleting nodes, as a real API server answered it."""

import pytest

from tests.integration.kubernetes.conformance import Server, Step, Steps, judge, run_topic
from tests.integration.kubernetes.known_differences import KNOWN_DIFFERENCES
from tests.integration.kubernetes.replay import Exchange, load
from tests.integration.kubernetes.stage import KUBELET, NODE, STRATEGIC_PATCH, Stage

EXCHANGES = load("nodes")
RECORDED = {exchange.name: exchange for exchange in EXCHANGES}
PATH = f"/api/v1/nodes/{NODE}"
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
LIFECYCLE = ("node-lifecycle", "node-no-execute")


def other_nodes(stage: Stage) -> None:
    for recorded in RECORDED["node-list-limit-exact"].body["items"][1:]:
        stage.node(recorded)


def pause(*controllers: str) -> Step:
    return lambda stage: stage.controls.pause(*(controllers or LIFECYCLE))


def resume(*controllers: str) -> Step:
    return lambda stage: stage.controls.resume(*(controllers or LIFECYCLE))


def set_unschedulable(stage: Stage, value: bool, manager: str) -> None:
    stage.patch(
        PATH,
        {"spec": {"unschedulable": value}},
        content_type=STRATEGIC_PATCH,
        query={"fieldManager": manager},
    )
    stage.controls.settle()


def set_taints(stage: Stage, *taints: dict[str, str], manager: str = "setup") -> None:
    stage.patch(
        PATH,
        {"spec": {"taints": list(taints) or None}},
        content_type=STRATEGIC_PATCH,
        query={"fieldManager": manager},
    )
    stage.controls.settle()


def cordoned_again(stage: Stage) -> None:
    set_unschedulable(stage, True, "nodemend")


def kubectl_cordon(stage: Stage) -> None:
    stage.controls.resume(*LIFECYCLE)
    set_unschedulable(stage, False, "OpenAPI-Generator")
    set_unschedulable(stage, True, "kubectl")


def kubectl_taint(stage: Stage) -> None:
    set_taints(
        stage,
        {"key": "person", "value": "here", "effect": "NoSchedule"},
        manager="kubectl-taint",
    )


def uncordoned_by_other(stage: Stage) -> None:
    set_taints(stage, manager="kubectl-taint")
    set_unschedulable(stage, True, "nodemend")
    set_unschedulable(stage, False, "someone-else")


def before_apply(stage: Stage) -> None:
    set_unschedulable(stage, False, "someone-else")
    stage.controls.pause(*LIFECYCLE)


def after_apply(stage: Stage) -> None:
    stage.controls.resume(*LIFECYCLE)
    set_unschedulable(stage, False, "nodemend")


def post_condition(stage: Stage, **fields: str) -> None:
    stage.patch(
        f"{PATH}/status",
        {"status": {"conditions": [{"type": "Ready", **fields}]}},
        agent=KUBELET,
        content_type=STRATEGIC_PATCH,
    )
    stage.controls.settle()


def not_ready(stage: Stage) -> None:
    stage.controls.resume(*LIFECYCLE)
    set_unschedulable(stage, False, "nodemend")
    post_condition(
        stage, status="False", reason="KubeletNotReady", message="container runtime is down"
    )


def same_name(stage: Stage) -> None:
    stage.node(RECORDED["node-get-same-name-new-machine"].body)


def hold(stage: Stage) -> None:
    stage.patch(PATH, {"metadata": {"finalizers": ["karpenter.sh/termination"]}})


def silent(stage: Stage) -> None:
    recorded = RECORDED["node-get"].body
    stage.node(recorded)
    stage.controls.pause("node-no-execute")
    stage.controls.silence(NODE)
    stage.controls.advance(60)


STEPS: Steps = {
    "node-list-label-selector": other_nodes,
    "node-patch-strategic-cordon-annotate-taint": pause(),
    "node-get-cordoned-with-unschedulable-taint": resume(),
    "node-patch-strategic-taints-replaces-list": pause(),
    "node-get-after-taints-replaced": resume(),
    "node-patch-strategic-unschedulable-null": cordoned_again,
    "node-patch-strategic-taint-drops-other-taint": lambda stage: set_taints(stage, GPU_TAINT),
    "node-patch-json-taint-append": lambda stage: set_taints(stage, GPU_TAINT),
    "node-patch-json-append-to-absent-list": set_taints,
    "node-patch-default-field-manager": pause(),
    "node-get-after-kubectl-cordon": kubectl_cordon,
    "node-get-after-kubectl-uncordon": lambda stage: set_unschedulable(stage, False, "kubectl"),
    "node-get-after-kubectl-taint": kubectl_taint,
    "node-get-cordoned-by-us-uncordoned-by-other": uncordoned_by_other,
    "node-get-cordoned-again-by-other": lambda stage: set_unschedulable(
        stage, True, "someone-else"
    ),
    "node-apply-cordon": before_apply,
    "node-patch-dry-run": after_apply,
    "node-put": pause(),
    "node-get-not-ready": not_ready,
    "node-get-same-name-new-machine": same_name,
    "node-delete-with-finalizer": hold,
    "node-get-silent-unknown": silent,
    "node-get-silent-unreachable": resume("node-no-execute"),
}


@pytest.fixture(scope="module")
def results(server: Server) -> dict[str, list[str]]:
    return run_topic("nodes", STEPS, server)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_the_answer_is_the_recorded_one(exchange: Exchange, results: dict[str, list[str]]) -> None:
    judge(exchange, results[exchange.name], KNOWN_DIFFERENCES["nodes"])
