"""In-memory policy source and state machine."""

from dataclasses import dataclass, field

from nodemend.application.ports import ExecutionStatus
from nodemend.domain.errors import PolicyInvalidError
from nodemend.domain.policy import ClusterPolicy, Policy

STATE_MACHINE_ARN = "arn:aws:states:eu-central-1:123456789012:stateMachine:nodemend-remediate-node"


@dataclass
class MemoryPolicies:
    """`Policies` with a policy that a test deploys; None: none was ever deployed."""

    policy: Policy | None = None
    default_cluster: ClusterPolicy | None = None
    problem: str = ""
    """Why the deployed policy cannot be used; empty: it can."""

    def current(self) -> Policy:
        if self.problem:
            raise PolicyInvalidError(self.problem)
        return (self.policy or Policy()).with_default_cluster(self.default_cluster)


@dataclass
class MemoryExecutions:
    """`Executions` that only knows names and statuses; a test ends them."""

    statuses: dict[str, ExecutionStatus] = field(default_factory=dict)
    """By ARN."""
    started: list[str] = field(default_factory=list)
    """Incident ids, one for each execution that was really started."""

    def start(self, incident_id: str) -> str:
        arn = self.arn_of(incident_id)
        running = ExecutionStatus("RUNNING")
        # One step, as StartExecution is one: of two threads one starts it.
        if self.statuses.setdefault(arn, running) is running:
            self.started.append(incident_id)
        return arn

    def status(self, execution_arn: str) -> ExecutionStatus | None:
        return self.statuses.get(execution_arn)

    def arn_of(self, incident_id: str) -> str:
        return STATE_MACHINE_ARN.replace(":stateMachine:", ":execution:") + f":{incident_id}"

    def end(self, incident_id: str, status: str, error: str = "", cause: str = "") -> None:
        """End an execution."""
        self.statuses[self.arn_of(incident_id)] = ExecutionStatus(status, error, cause)
