"""The state machine's checks: the real one passes, and each kind of mistake is found."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nodemend.contracts.policy import PolicyDocument
from tests.unit.structure.repository import ROOT
from tools.asl import (
    Machine,
    extreme_policies,
    history_events,
    load_machines,
    longest_run_s,
    polls_of,
)
from tools.lint_asl import MAX_HISTORY, problems_of

REAL = next(m for m in load_machines(ROOT / "template.yaml") if m.id == "RemediateNode")
KNOWN = set(problems_of(REAL))
States = dict[str, dict[str, Any]]
Mutation = Callable[[States], object]


def mutated(mutation: Mutation) -> Machine:
    definition = copy.deepcopy(REAL.definition)
    mutation(definition["States"])
    return replace(REAL, definition=definition)


def drop(names: list[str], name: str) -> None:
    names.remove(name)


MISTAKES: dict[str, tuple[Mutation, str]] = {
    "a retry of ours is missing": (
        lambda s: drop(s["DrainNode"]["Retry"][0]["ErrorEquals"], "ClusterUnavailableError"),
        "DrainNode: does not retry ClusterUnavailableError",
    ),
    "a platform error is not retried": (
        lambda s: drop(s["DrainNode"]["Retry"][1]["ErrorEquals"], "Lambda.Unknown"),
        "DrainNode: does not retry Lambda.Unknown",
    ),
    "everything is retried": (
        lambda s: s["DrainNode"]["Retry"][0]["ErrorEquals"].append("States.ALL"),
        "DrainNode: must not retry States.ALL",
    ),
    "every failure is retried": (
        lambda s: s["StartRepair"]["Retry"][0]["ErrorEquals"].append("States.TaskFailed"),
        "StartRepair: must not retry States.TaskFailed",
    ),
    "a permanent error is retried": (
        lambda s: s["StartRepair"]["Retry"][0]["ErrorEquals"].append("RepairRefusedError"),
        "StartRepair: must not retry RepairRefusedError",
    ),
    "a name is retried twice": (
        lambda s: s["DrainNode"]["Retry"][1]["ErrorEquals"].append("AwsUnavailableError"),
        "DrainNode: retries AwsUnavailableError twice",
    ),
    "time-outs are retried often": (
        lambda s: s["DrainNode"]["Retry"][2].update(MaxAttempts=6),
        "DrainNode: time-outs must have a retrier of their own",
    ),
    "time-outs share a retrier": (
        lambda s: s["DrainNode"]["Retry"][2]["ErrorEquals"].append("AwsUnavailableError"),
        "DrainNode: time-outs must have a retrier of their own",
    ),
    "retries have no jitter": (
        lambda s: s["DrainNode"]["Retry"][0].pop("JitterStrategy"),
        "needs JitterStrategy FULL and MaxDelaySeconds",
    ),
    "retries have no cap": (
        lambda s: s["DrainNode"]["Retry"][0].pop("MaxDelaySeconds"),
        "needs JitterStrategy FULL and MaxDelaySeconds",
    ),
    "a retrier never retries": (
        lambda s: s["DrainNode"]["Retry"][0].update(MaxAttempts=0),
        "DrainNode: AwsUnavailableError is not retried",
    ),
    "the last catch is missing": (
        lambda s: s["VerifyFault"]["Catch"].pop(),
        "VerifyFault: the last Catch must be exactly States.ALL",
    ),
    "the last catch names more": (
        lambda s: s["VerifyFault"]["Catch"][-1]["ErrorEquals"].append("SupersededError"),
        "VerifyFault: the last Catch must be exactly States.ALL",
    ),
    "the catch-all comes first": (
        lambda s: s["VerifyFault"]["Catch"].insert(0, s["VerifyFault"]["Catch"].pop()),
        "VerifyFault: the last Catch must be exactly States.ALL",
    ),
    "a permanent error is not caught by name": (
        lambda s: drop(s["VerifyFault"]["Catch"][1]["ErrorEquals"], "LeaseLostError"),
        "VerifyFault: does not catch LeaseLostError",
    ),
    "a catch has a misspelt name": (
        lambda s: s["VerifyFault"]["Catch"][1]["ErrorEquals"].append("LeaseLost"),
        "VerifyFault: catches LeaseLost, which nothing raises",
    ),
    "a catch overwrites the state": (
        lambda s: s["VerifyFault"]["Catch"][1].pop("ResultPath"),
        "VerifyFault: Catch of AwsForbiddenError must keep it in $.failure",
    ),
    "no state knows an error": (
        lambda s: [
            drop(catcher["ErrorEquals"], "RepairRefusedError")
            for state in s.values()
            for catcher in state.get("Catch", [])
            if "RepairRefusedError" in catcher["ErrorEquals"]
        ],
        "errors.RepairRefusedError is named in no state",
    ),
    "a target does not exist": (
        lambda s: s["CordonNode"].update(Next="CordonChoise"),
        "CordonNode: target 'CordonChoise' does not exist",
    ),
    "a catch leads nowhere": (
        lambda s: s["CordonNode"]["Catch"][0].update(Next="Nowhere"),
        "CordonNode: target 'Nowhere' does not exist",
    ),
    "a default leads nowhere": (
        lambda s: s["CordonChoice"].update(Default="Nowhere"),
        "CordonChoice: target 'Nowhere' does not exist",
    ),
    "a state is not reachable": (
        lambda s: s.update(Orphan={"Type": "Pass", "Next": "CloseIncident"}),
        "Orphan is not reachable",
    ),
    "a task is shorter than its function": (
        lambda s: s["DrainNode"].update(TimeoutSeconds=30),
        "DrainNode: TimeoutSeconds is 30, must be 70",
    ),
    "a task has no time-out": (
        lambda s: s["DrainNode"].pop("TimeoutSeconds"),
        "DrainNode: TimeoutSeconds is None",
    ),
    "a substitution is not defined": (
        lambda s: s["DrainNode"]["Parameters"].update(FunctionName="${DrainFunctionArn}"),
        "${DrainFunctionArn} is not in DefinitionSubstitutions",
    ),
    "a substitution is not used": (
        lambda s: s["DrainNode"]["Parameters"].update(FunctionName="${VerifyFaultFunctionArn}"),
        "substitution DrainNodeFunctionArn is not used",
    ),
    "a task runs something else": (
        lambda s: s["DrainNode"].update(Resource="arn:aws:states:::sqs:sendMessage"),
        "DrainNode: must invoke a function of the template",
    ),
    "a word is not decided on": (
        lambda s: s["DrainChoice"]["Choices"].pop(0),
        "DrainNode: answers ['close', 'drained', 'wait']",
    ),
    "a word is misspelt": (
        lambda s: s["DrainChoice"]["Choices"][0].update(StringEquals="Drained"),
        "DrainNode: answers ['close', 'drained', 'wait']",
    ),
    "a choice reads another field": (
        lambda s: s["DrainChoice"]["Choices"][0].update(Variable="$.word"),
        "DrainNode: answers ['close', 'drained', 'wait']",
    ),
    "closing leads on": (
        lambda s: s["DrainChoice"].update(Default="StartRepair"),
        "DrainNode: the word close must lead to CloseIncident",
    ),
    "an answer is left in its envelope": (
        lambda s: s["DrainNode"].pop("OutputPath"),
        "DrainNode: OutputPath must be $.Payload",
    ),
    "a task has no result model": (
        lambda s: s.update(DrainPods=s.pop("DrainNode")),
        "target 'DrainNode' does not exist",
    ),
    "a path ends without closing": (
        lambda s: [s["ReleaseNode"].pop("Next"), s["ReleaseNode"].update(End=True)],
        "ReleaseNode: ends the execution without CloseIncident",
    ),
    "a failure ends without closing": (
        lambda s: s["DrainNode"]["Catch"][1].update(Next="IncidentNotClosed"),
        "DrainNode: may not end in IncidentNotClosed without CloseIncident",
    ),
    "an admitted incident is dropped": (
        lambda s: s["AdmitRemediation"]["Catch"][-1].update(Next="InputRejected"),
        "AdmitRemediation: may not end in InputRejected without CloseIncident",
    ),
    "a fixed wait": (
        lambda s: s["WaitBeforeDrain"].update(SecondsPath=None, Seconds=20),
        "WaitBeforeDrain: must wait by SecondsPath $.wait_s",
    ),
    "jsonata": (
        lambda s: s["DrainNode"].update(Arguments={"a": "{% $states.input %}"}),
        "DrainNode: Arguments is JSONata",
    ),
    "the start time in a payload": (
        lambda s: s["DrainNode"]["Parameters"]["Payload"].update(
            {"at.$": "$$.Execution.StartTime"}
        ),
        "DrainNode: at.$ must be a plain JSONPath",
    ),
    "an intrinsic function": (
        lambda s: s["DrainNode"]["Parameters"]["Payload"].update(
            {"at.$": "States.Format('{}', $.a[0])"}
        ),
        "DrainNode: at.$ must be a plain JSONPath",
    ),
    "the next rung is not decided on": (
        lambda s: s["EscalationChoice"]["Choices"].clear(),
        "EscalateIncident: answers ['close', 'repair']",
    ),
    "a loop without a bound": (
        lambda s: s["RepairChoice"]["Choices"][0].update(Next="StartRepair"),
        "StartRepair is in a loop that no deadline of the policy bounds",
    ),
}


def test_real_machine_has_no_problem():
    assert problems_of(REAL) == []


@pytest.mark.parametrize(("mutation", "line"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_found(mutation, line):
    found = set(problems_of(mutated(mutation))) - KNOWN

    assert [text for text in found if line in text]


def test_machine_that_ends_before_a_policy_allows_is_found():
    short = replace(REAL, definition={**REAL.definition, "TimeoutSeconds": 86_400})

    assert [line for line in problems_of(short) if "TimeoutSeconds must be more than" in line]


def test_longest_run_holds_every_deadline_of_the_model():
    repairs_s = 2 * (86_400 + 86_400)  # reboot and replacement: to happen, and to be proven
    asked_s = 2 * (86_400 + 86_400)  # two requests, each with another look after it
    assert longest_run_s() == 86_400 + 604_800 + repairs_s + 4 * 86_400 + asked_s


def test_history_is_counted_as_a_real_one_is():
    """Start, one task that succeeds at once, end: seven events, as the console shows them."""
    task = {"Type": "Task", "End": True}
    machine = Machine("One", {"StartAt": "A", "States": {"A": task}}, {}, {})

    assert history_events(machine, PolicyDocument(schema_version=1)) == 7


def test_the_next_rung_is_a_bounded_way_back_and_no_loop():
    """A whole second repair is counted: its polls, and one more visit of every state on the way."""
    assert "StartRepair" in REAL.ladder
    assert "EscalateIncident" in REAL.ladder
    assert "DrainNode" not in REAL.ladder
    assert REAL.loop_of("StartRepair") == frozenset()
    shorter = PolicyDocument.model_validate(
        {"schema_version": 1, "waits": {"check_poll_s": [10]}, "deadlines": {"reboot_s": 100}}
    )
    longer = PolicyDocument.model_validate(
        {"schema_version": 1, "waits": {"check_poll_s": [10]}, "deadlines": {"reboot_s": 200}}
    )
    assert polls_of(longer)["CheckRepair"] - polls_of(shorter)["CheckRepair"] == 10
    assert history_events(REAL, longer) > history_events(REAL, shorter)


@pytest.mark.parametrize(
    ("before", "requests"),
    [("cordon", 2), ("repair", 2)],
)
def test_waiting_for_a_yes_is_counted_for_each_request(before, requests):
    """The loop before the repair is on no way without the word for it, and counts all the same."""
    assert "ApproveRepair" not in REAL.on_one_rung
    assert REAL.loop_of("ApproveRepair") == {
        "ApproveRepair",
        "ApproveRepairChoice",
        "WaitBeforeApproveRepair",
    }
    short, long = (
        PolicyDocument.model_validate(
            {
                "schema_version": 1,
                "waits": {"approval_poll_s": [10]},
                "approval": {"before": before, "timeout_s": timeout_s},
            }
        )
        for timeout_s in (100, 200)
    )

    grown = history_events(REAL, long) - history_events(REAL, short)
    assert grown == requests * 10 * (5 + 2 + 2)


def test_each_poll_adds_task_choice_and_wait():
    short = PolicyDocument.model_validate(
        {"schema_version": 1, "waits": {"drain_poll_s": [10]}, "deadlines": {"drain_s": 100}}
    )
    long = PolicyDocument.model_validate(
        {"schema_version": 1, "waits": {"drain_poll_s": [10]}, "deadlines": {"drain_s": 200}}
    )

    assert history_events(REAL, long) - history_events(REAL, short) == 10 * (5 + 2 + 2)


def test_default_policy_fits_even_if_every_poll_uses_up_its_retries():
    default = PolicyDocument(schema_version=1)

    assert history_events(REAL, default, retries_of_polls=True) < MAX_HISTORY


@pytest.mark.parametrize(("kind", "policy"), extreme_policies().items(), ids=extreme_policies())
def test_most_extreme_policy_of_its_kind_fits(kind, policy):
    assert history_events(REAL, policy) < MAX_HISTORY


WAITS = st.lists(st.sampled_from([1, 2, 5, 20, 60, 300, 3600]), min_size=1, max_size=6)
POLICIES = st.fixed_dictionaries(
    {
        "schema_version": st.just(1),
        "hold_down_s": st.integers(0, 86_400),
        "waits": st.fixed_dictionaries(
            {"drain_poll_s": WAITS, "check_poll_s": WAITS, "approval_poll_s": WAITS}
        ),
        "approval": st.none()
        | st.fixed_dictionaries(
            {
                "before": st.sampled_from(["cordon", "repair"]),
                "timeout_s": st.integers(1, 86_400),
            }
        ),
        "deadlines": st.fixed_dictionaries(
            {
                "verify_s": st.integers(1, 86_400),
                "drain_s": st.integers(1, 604_800),
                "replace_s": st.integers(1, 86_400),
                "reboot_s": st.integers(1, 86_400),
            }
        ),
    }
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(document=POLICIES)
def test_every_accepted_policy_fits(document):
    try:
        policy = PolicyDocument.model_validate(document)
    except ValidationError:
        return
    assert history_events(REAL, policy) < MAX_HISTORY, polls_of(policy)
