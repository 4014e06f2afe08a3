"""Drives the steps in the order of the state machine's own definition, on a stage.

Not an interpreter: it reads the few things that `remediate_node.asl.yaml` uses, so that a whole
remediation can be told in milliseconds. The real interpreter runs in the scenarios.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from nodemend.application.admit_remediation import admit_remediation
from nodemend.application.check_repair import check_repair
from nodemend.application.close_incident import close_incident
from nodemend.application.cordon_node import cordon_node
from nodemend.application.drain_node import drain_node
from nodemend.application.escalate_incident import escalate_incident
from nodemend.application.release_node import release_node
from nodemend.application.request_approval import request_approval
from nodemend.application.start_repair import start_repair
from nodemend.application.validate_node import validate_node
from nodemend.application.verify_fault import verify_fault
from nodemend.contracts import steps
from nodemend.domain.errors import NodemendError
from tests.unit.application.stage import CrashError, Stage

DEFINITION = Path(__file__).parents[3] / "statemachines" / "remediate_node.asl.yaml"

FUNCTIONS: Mapping[str, tuple[type[BaseModel], Callable[..., BaseModel], str]] = {
    "AdmitRemediation": (steps.AdmitRemediationRequest, admit_remediation, "dispatch"),
    "VerifyFault": (steps.VerifyFaultRequest, verify_fault, "verify"),
    "RequestApproval": (steps.RequestApprovalRequest, request_approval, "verify"),
    "CordonNode": (steps.CordonNodeRequest, cordon_node, "step"),
    "DrainNode": (steps.DrainNodeRequest, drain_node, "step"),
    "StartRepair": (steps.StartRepairRequest, start_repair, "repair"),
    "CheckRepair": (steps.CheckRepairRequest, check_repair, "repair"),
    "ValidateNode": (steps.ValidateNodeRequest, validate_node, "verify"),
    "ReleaseNode": (steps.ReleaseNodeRequest, release_node, "step"),
    "EscalateIncident": (steps.EscalateIncidentRequest, escalate_incident, "step"),
    "CloseIncident": (steps.CloseIncidentRequest, close_incident, "close"),
}
"""Request, use case and ports by the function's name."""


@cache
def definition() -> dict[str, Any]:
    """The state machine as it is deployed, substitutions left alone."""
    loaded: dict[str, Any] = yaml.safe_load(DEFINITION.read_text())
    return loaded


@dataclass
class Machine:
    """One execution of the state machine."""

    stage: Stage
    timeline: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    """What others do, by seconds since the start; it happens during the waits."""
    visited: list[str] = field(default_factory=list)
    error: str = ""

    def run(self, name: str, given: Any = None) -> dict[str, Any]:
        """Run to the end; return the last state's output."""
        start = self.stage.clock.now()
        arn = self.stage.executions.arn_of(name)
        execution = {
            "Id": arn,
            "Name": name,
            "Input": given or {"schema_version": 1, "incident_id": name},
        }
        data: Any = execution["Input"]
        current = definition()["StartAt"]
        while current:
            self.visited.append(current)
            assert len(self.visited) < 2000, "the execution never ends"
            state = definition()["States"][current]
            match state["Type"]:
                case "Task":
                    data, current = self._task(state, data, execution)
                case "Pass":
                    data, current = _filled(state["Parameters"], data, execution), state["Next"]
                case "Choice":
                    current = self._choice(state, data)
                case "Wait":
                    self.stage.clock.advance(data[state["SecondsPath"].removeprefix("$.")])
                    passed = (self.stage.clock.now() - start).total_seconds()
                    while self.timeline and self.timeline[0][0] <= passed:
                        self.timeline.pop(0)[1]()
                    current = state["Next"]
                case "Fail":
                    assert state["ErrorPath"] == "$.failure.Error"
                    self.error = data["failure"]["Error"]
                    current = ""
                case other:
                    raise AssertionError(f"{other} is not known here")
        self.stage.executions.end(name, "FAILED" if self.error else "SUCCEEDED")
        assert isinstance(data, dict)
        return data

    def _choice(self, state: Mapping[str, Any], data: Mapping[str, Any]) -> str:
        for rule in state["Choices"]:
            if data.get(rule["Variable"].removeprefix("$.")) == rule["StringEquals"]:
                return str(rule["Next"])
        return str(state["Default"])

    def _task(
        self, state: Mapping[str, Any], data: dict[str, Any], execution: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str]:
        parameters = _filled(state["Parameters"], data, execution)
        function = parameters["FunctionName"].removeprefix("${").removesuffix("FunctionArn}")
        request, use_case, ports = FUNCTIONS[function]
        attempts: dict[int, int] = {}
        while True:
            try:
                parsed = request.model_validate(parameters["Payload"])
                result = use_case(parsed, ports=getattr(self.stage, ports))
            except (NodemendError, ValueError, CrashError) as error:
                name = error.lambda_error if isinstance(error, CrashError) else type(error).__name__
                if self._is_retried(state, name, attempts):
                    continue
                rule = _matching(state["Catch"], name)
                assert rule is not None
                cause = json.dumps({"errorMessage": str(error), "errorType": name})
                failed = {**data, "failure": {"Error": name, "Cause": cause}}
                return failed, str(rule["Next"])
            assert state["OutputPath"] == "$.Payload"
            return result.model_dump(mode="json"), str(state.get("Next", ""))

    def _is_retried(self, state: Mapping[str, Any], name: str, attempts: dict[int, int]) -> bool:
        rule = _matching(state["Retry"], name)
        if rule is None or attempts.get(id(rule), 0) >= rule["MaxAttempts"]:
            return False
        done = attempts.setdefault(id(rule), 0)
        wait_s = rule["IntervalSeconds"] * rule.get("BackoffRate", 2) ** done
        self.stage.clock.advance(min(wait_s, rule.get("MaxDelaySeconds", wait_s)))
        attempts[id(rule)] += 1
        return True


def _matching(rules: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next(
        (r for r in rules if name in r["ErrorEquals"] or "States.ALL" in r["ErrorEquals"]), None
    )


def _filled(template: Any, data: Mapping[str, Any], execution: Mapping[str, Any]) -> Any:
    if not isinstance(template, dict):
        return template
    filled = {}
    for key, value in template.items():
        if key.endswith(".$"):
            filled[key.removesuffix(".$")] = _at(value, data, execution)
        else:
            filled[key] = _filled(value, data, execution)
    return filled


def _at(path: str, data: Mapping[str, Any], execution: Mapping[str, Any]) -> Any:
    if path == "$":
        return data
    if path.startswith("$$.Execution."):
        return execution[path.removeprefix("$$.Execution.")]
    return data[path.removeprefix("$.")]
