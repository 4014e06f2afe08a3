"""The deployed stack: what its outputs say, and the AWS clients to reach it with."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

if TYPE_CHECKING:
    from mypy_boto3_appconfig.client import AppConfigClient
    from mypy_boto3_stepfunctions.client import SFNClient


class CommandError(Exception):
    """What an operator is told in one line, with the exit status 1."""


def said(error: BotoCoreError | ClientError, doing: str) -> CommandError:
    """Return AWS's refusal in one line that begins with what was tried."""
    return CommandError(f"{doing}: {' '.join(str(error).split())}")


@dataclass(frozen=True, slots=True)
class Stack:
    """A deployed stack of template.yaml.

    Args:
        name: The CloudFormation stack's name.
        session: Where credentials and region come from.
        sleep: Waits between two looks; an argument so that tests need no time.
    """

    name: str
    session: boto3.Session = field(default_factory=boto3.Session)
    sleep: Callable[[float], None] = time.sleep

    def outputs(self) -> Mapping[str, str]:
        """Return the stack's outputs.

        Raises:
            CommandError: if there is no such stack, or it cannot be read.
        """
        outputs = self._described().get("Outputs", [])
        return {one.get("OutputKey", ""): one.get("OutputValue", "") for one in outputs}

    def parameters(self) -> Mapping[str, str]:
        """Return the parameters that the stack was deployed with.

        Raises:
            CommandError: if there is no such stack, or it cannot be read.
        """
        given = self._described().get("Parameters", [])
        return {one.get("ParameterKey", ""): one.get("ParameterValue", "") for one in given}

    def output(self, name: str) -> str:
        """Return one output.

        Raises:
            CommandError: if the stack has no such output.
        """
        value = self.outputs().get(name, "")
        if not value:
            raise CommandError(
                f"stack {self.name} has no output {name}: name nodemend's stack with --stack, or "
                "deploy a release that has it"
            )
        return value

    def _described(self) -> Mapping[str, Any]:
        try:
            client: Any = self.session.client("cloudformation")
            answer = client.describe_stacks(StackName=self.name)
        except (BotoCoreError, ClientError) as error:
            raise said(error, f"stack {self.name} cannot be read") from error
        described: Mapping[str, Any] = answer["Stacks"][0]
        return described

    def stepfunctions(self) -> "SFNClient":
        """Return the client for Step Functions."""
        return self.session.client("stepfunctions")

    def appconfig(self) -> "AppConfigClient":
        """Return the client for AppConfig."""
        return self.session.client("appconfig")
