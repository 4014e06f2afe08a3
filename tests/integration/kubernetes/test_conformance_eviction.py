"""The eviction subresource, answer by answer as a real API server gave it."""

import threading

import pytest

from tests.integration.kubernetes.conformance import Server, Steps, judge, run_topic
from tests.integration.kubernetes.known_differences import KNOWN_DIFFERENCES
from tests.integration.kubernetes.replay import Exchange, load
from tests.integration.kubernetes.stage import SUCCEEDED, Stage

EXCHANGES = load("eviction")
RECORDED = {exchange.name: exchange for exchange in EXCHANGES}
DISRUPTION = "disruption"
FAILED = {**SUCCEEDED, "phase": "Failed"}


def begin(stage: Stage) -> None:
    stage.node()
    stage.pod("ml", "plain")


def shapes(stage: Stage) -> None:
    stage.clear("ml")
    stage.pod("ml", "shape")


def graces(stage: Stage) -> None:
    for name in ("g0", "g120", "gneg"):
        stage.pod("ml", name, labels={"app": "g"})
    stage.pod("ml", "g600", labels={"app": "g"}, terminationGracePeriodSeconds=600)


def web(stage: Stage) -> None:
    stage.clear("ml")
    stage.pod("ml", "web-0", labels={"app": "web"})
    stage.pod("ml", "web-1", labels={"app": "web"})
    stage.budget("ml", "web", minAvailable=1, match="web")
    stage.controls.settle()


def web_pending_and_finished(stage: Stage) -> None:
    labels = {"app": "web"}
    stage.pod("ml", "web-pend", labels=labels, status=None)
    stage.pod("ml", "web-unsched", labels=labels, node=None, gpus=16, status=None)
    stage.pod("ml", "web-done", labels=labels, status=SUCCEEDED)
    stage.pod("ml", "web-failed", labels=labels, status=FAILED)


def new_budget(stage: Stage) -> None:
    stage.clear("ml")
    stage.pod("ml", "new-0", labels={"app": "new"})
    stage.pod("ml", "new-1", labels={"app": "new"})
    stage.controls.pause(DISRUPTION)
    stage.budget("ml", "new", minAvailable=1, match="new")


def changed_budget(stage: Stage) -> None:
    stage.controls.resume(DISRUPTION)
    stage.controls.pause(DISRUPTION)
    stage.change_budget("ml", "new", minAvailable=0)


def two_budgets(stage: Stage) -> None:
    stage.clear("ml")
    stage.pod("ml", "two")
    stage.pod("ml", "two-b", labels={"app": "two"})
    for name in ("one", "other"):
        stage.budget("ml", name, minAvailable=1, match="two")
    stage.controls.settle()


def two_unready(stage: Stage) -> None:
    stage.post_status("ml", "two", RECORDED["pod-get-after-eviction"].body["status"], ready=False)


def sick(stage: Stage) -> None:
    stage.clear("ml")
    stage.pod("ml", "sick-0", labels={"app": "sick"}, ready=False)
    stage.budget("ml", "sick", minAvailable=1, match="sick")
    stage.controls.settle()


def sick_always_allow(stage: Stage) -> None:
    for name in ("sick-0", "sick-1"):
        stage.confirm_deletion("ml", name)
    stage.pod("ml", "sick-0", labels={"app": "sick"}, ready=False)
    stage.change_budget("ml", "sick", unhealthyPodEvictionPolicy="AlwaysAllow")
    stage.controls.settle()


def sick_min_available_0(stage: Stage) -> None:
    stage.clear("ml")
    stage.pod("ml", "sick-0", labels={"app": "sick"}, ready=False)
    stage.budget("ml", "sick", minAvailable=0, match="sick")
    stage.controls.settle()


def bare(stage: Stage) -> None:
    stage.clear("ml")
    stage.pod("ml", "bare-0", labels={"app": "bare"})
    stage.pod("ml", "bare-1", labels={"app": "bare"})
    stage.budget("ml", "bare", maxUnavailable=1, match="bare")
    stage.controls.settle()


def tune(stage: Stage) -> None:
    stage.clear("ml", "bare-0", "bare-1")
    stage.workload("jobs", "ml", "tune", {}, restartPolicy="Never")
    [pod] = stage.run_pods("ml", "tune")
    stage.replay.translation.learn("tune-qx5kr", pod["metadata"]["name"])
    stage.budget("ml", "tune", maxUnavailable=1, match="tune")
    stage.controls.settle()


def tune_after_sync(stage: Stage) -> None:
    stage.delete_budget("ml", "tune")
    stage.budget("ml", "tune2", maxUnavailable=1, match="nothing-yet")
    stage.controls.settle()
    relabel_tune(stage, "nothing-yet")


def relabel_tune(stage: Stage, app: str) -> None:
    name = stage.replay.translation.to_actual("tune-qx5kr")
    stage.patch(f"/api/v1/namespaces/ml/pods/{name}", {"metadata": {"labels": {"app": app}}})
    stage.controls.settle()


def tune_alone(stage: Stage) -> None:
    stage.delete_budget("ml", "tune2")
    relabel_tune(stage, "tune")


def all_pods(stage: Stage) -> None:
    stage.call("DELETE", "/apis/batch/v1/namespaces/ml/jobs/tune")
    stage.controls.settle()
    stage.clear("ml", "bare-0", "bare-1")
    stage.budget("ml", "all", minAvailable=2, selector={})
    stage.controls.settle()


def no_selector(stage: Stage) -> None:
    stage.delete_budget("ml", "all")
    stage.budget("ml", "nil", minAvailable=2)
    stage.controls.settle()


def other_namespace(stage: Stage) -> None:
    stage.clear("ml")
    stage.pod("ml", "other-ns")
    stage.budget("web", "other-ns", minAvailable=1, match="other-ns")
    stage.controls.settle()


def mirror(stage: Stage) -> None:
    digest = "3f1c2b9a8d7e6f5041322314a5b6c7d8"
    stage.pod(
        "ml",
        "static-ip-10-0-1-5.ec2.internal",
        annotations={"kubernetes.io/config.mirror": digest, "kubernetes.io/config.hash": digest},
    )


def agent(stage: Stage) -> None:
    stage.workload(
        "daemonsets", "ml", "agent", {}, container="a", tolerations=[{"operator": "Exists"}]
    )
    [pod] = stage.run_pods("ml", "agent")
    stage.replay.translation.learn("agent-pfj6s", pod["metadata"]["name"])


def agent_gone(stage: Stage) -> None:
    name = stage.replay.translation.to_actual("agent-pfj6s")
    stage.confirm_deletion("ml", name)


def held(stage: Stage) -> None:
    stage.pod("ml", "held", finalizers=["example.com/hold"])


def replaced_pending(stage: Stage) -> None:
    stage.workload("statefulsets", "ml", "db", {"replicas": 1, "serviceName": "db"})
    [pod] = stage.run_pods("ml", "db")
    stage.replay.translation.learn("b627280d-010f-4cc3-974f-d8f83d02d056", pod["metadata"]["uid"])
    stage.confirm_deletion("ml", "db-0")


def replaced_running(stage: Stage) -> None:
    stage.run_pods("ml", "db")


def race(stage: Stage) -> None:
    for number in range(6):
        stage.pod("ml", f"race-{number}", labels={"app": "race"})
    stage.budget("ml", "race", minAvailable=5, match="race")
    stage.controls.settle()
    statuses: list[int] = []

    def evict(name: str) -> None:
        body = {"metadata": {"name": name}}
        path = f"/api/v1/namespaces/ml/pods/{name}/eviction"
        statuses.append(
            stage.api.send("POST", path, body=body, content_type="application/json").status
        )

    threads = [threading.Thread(target=evict, args=(f"race-{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [201, 429, 429, 429, 429, 429]
    stage.controls.settle()


def closing(stage: Stage) -> None:
    for name in ("last", "last2"):
        stage.pod("closing", name, labels={"app": "last"})
    stage.controls.pause("namespace")


STEPS: Steps = {
    "evict-dry-run": begin,
    "evict-missing-pod": lambda stage: stage.confirm_deletion("ml", "plain"),
    "evict-grace-0": graces,
    "evict-without-metadata-name": shapes,
    "pdb-get-before": web,
    "evict-pdb-uid-mismatch-consumes-budget": lambda stage: stage.controls.pause(DISRUPTION),
    "pdb-get-just-after-controller-resumes": lambda stage: stage.controls.resume(DISRUPTION),
    "pdb-get-after-uid-mismatch-recovered": lambda stage: stage.controls.advance(121),
    "evict-pdb-allowed": lambda stage: stage.controls.pause(DISRUPTION),
    "pdb-get-exhausted": lambda stage: stage.controls.resume(DISRUPTION),
    "pdb-get-exhausted-with-pending-and-finished": web_pending_and_finished,
    "pdb-get-not-processed": new_budget,
    "pdb-get-spec-changed-not-processed": changed_budget,
    "evict-pdb-processed": lambda stage: stage.controls.resume(DISRUPTION),
    "evict-two-pdbs": two_budgets,
    "evict-two-pdbs-unready": two_unready,
    "pdb-get-no-healthy-pod": sick,
    "evict-unready-if-healthy-budget-explicit-blocked": lambda stage: stage.change_budget(
        "ml", "sick", unhealthyPodEvictionPolicy="IfHealthyBudget"
    ),
    "pdb-get-healthy-enough-no-disruption": lambda stage: stage.pod(
        "ml", "sick-1", labels={"app": "sick"}
    ),
    "pdb-get-always-allow": sick_always_allow,
    "pdb-get-min-available-0-unready": sick_min_available_0,
    "pdb-get-max-unavailable-bare-pods": bare,
    "pdb-get-sync-failed": tune,
    "pdb-get-sync-failed-after-sync": tune_after_sync,
    "evict-job-pod": tune_alone,
    "pdb-get-empty-selector": all_pods,
    "pdb-get-no-selector": no_selector,
    "evict-pdb-other-namespace": other_namespace,
    "evict-mirror-pod": mirror,
    "evict-daemonset-pod": agent,
    "pod-list-daemonset-pod-again": agent_gone,
    "evict-pod-with-finalizer-grace-0": held,
    "evict-replaced-pending-pod-old-uid": replaced_pending,
    "evict-replaced-running-pod-old-uid": replaced_running,
    "pdb-get-after-race": race,
    "namespace-delete": closing,
    "pod-get-namespace-terminating": lambda stage: stage.controls.resume("namespace"),
}


@pytest.fixture(scope="module")
def results(server: Server) -> dict[str, list[str]]:
    return run_topic("eviction", STEPS, server)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_the_answer_is_the_recorded_one(exchange: Exchange, results: dict[str, list[str]]) -> None:
    judge(exchange, results[exchange.name], KNOWN_DIFFERENCES["eviction"])
