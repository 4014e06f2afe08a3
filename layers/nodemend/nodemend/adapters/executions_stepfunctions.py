"""Runs of the state machine, each named by its incident's id."""

import json
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from nodemend.adapters._aws import error_code, translating
from nodemend.application.ports import ExecutionStatus
from nodemend.domain.errors import InvalidInputError

if TYPE_CHECKING:
    from mypy_boto3_stepfunctions.client import SFNClient


class StepFunctionsExecutions:
    """Executions of one Standard state machine.

    A name is taken for 90 days. For the same name and input AWS answers 200 while the first
    execution runs and `ExecutionAlreadyExists` afterwards; emulators differ. Both mean the same
    here: there is one execution, and this is its ARN.
    """

    def __init__(self, *, state_machine_arn: str, client: "SFNClient") -> None:
        parts = state_machine_arn.split(":")
        if len(parts) not in (7, 8) or parts[5] != "stateMachine":
            raise InvalidInputError(
                "state_machine_arn",
                f"{state_machine_arn!r} is no state machine's ARN",
                "give arn:aws:states:REGION:ACCOUNT:stateMachine:NAME",
            )
        self._state_machine_arn = state_machine_arn
        self._execution_prefix = ":".join([*parts[:5], "execution", parts[6], ""])
        self._client = client

    def arn_of(self, incident_id: str) -> str:
        """Return the ARN that the incident's execution has or would have."""
        return self._execution_prefix + incident_id

    def start(self, incident_id: str) -> str:
        """Start the remediation under the incident's id and return its ARN."""
        document = json.dumps({"schema_version": 1, "incident_id": incident_id})
        with translating("states:StartExecution"):
            try:
                answer = self._client.start_execution(
                    stateMachineArn=self._state_machine_arn, name=incident_id, input=document
                )
            except ClientError as error:
                if error_code(error) != "ExecutionAlreadyExists":
                    raise
                return self.arn_of(incident_id)
        return answer["executionArn"]

    def status(self, execution_arn: str) -> ExecutionStatus | None:
        """Return the status, or None if there is no such execution (an empty ARN is none)."""
        if not execution_arn:
            return None
        with translating("states:DescribeExecution"):
            try:
                answer = self._client.describe_execution(executionArn=execution_arn)
            except ClientError as error:
                if error_code(error) != "ExecutionDoesNotExist":
                    raise
                return None
        return ExecutionStatus(
            status=answer["status"], error=answer.get("error", ""), cause=answer.get("cause", "")
        )
