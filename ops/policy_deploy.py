"""`nodemend policy deploy`: check here, store a version, deploy it, wait until it holds."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from ops.policy_file import read_policy
from ops.stack import CommandError, Stack, said

if TYPE_CHECKING:
    from mypy_boto3_appconfig.client import AppConfigClient

ALL_AT_ONCE = "AppConfig.AllAtOnce"
"""AWS's own strategy: everywhere at once, then ten minutes of baking in which it holds already."""
WAIT_S = 2.0
WAIT_FOR_S = 600
_HOLDS = frozenset({"BAKING", "COMPLETE"})
_ENDED = frozenset({"ROLLED_BACK", "ROLLING_BACK", "REVERTED"})


@dataclass(frozen=True, slots=True)
class Deployed:
    """What was deployed."""

    version: int
    state: str
    """`BAKING`: in force, but AppConfig takes no other deployment until that is over."""


def deploy_policy(stack: Stack, path: Path, *, strategy: str = ALL_AT_ONCE) -> Deployed:
    """Deploy a policy file and wait until it is in force.

    Raises:
        CommandError: if it is invalid, refused, rolled back, or takes too long.
    """
    _, content = read_policy(path)
    outputs = stack.outputs()
    names = ("PolicyApplicationId", "PolicyEnvironmentId", "PolicyProfileId")
    application, environment, profile = (outputs.get(name) or stack.output(name) for name in names)
    client = stack.appconfig()
    try:
        version = client.create_hosted_configuration_version(
            ApplicationId=application,
            ConfigurationProfileId=profile,
            Content=content,
            ContentType="application/x-yaml",
        )["VersionNumber"]
    except (BotoCoreError, ClientError) as error:
        raise said(error, "the policy cannot be stored") from error
    try:
        number = client.start_deployment(
            ApplicationId=application,
            EnvironmentId=environment,
            ConfigurationProfileId=profile,
            ConfigurationVersion=str(version),
            DeploymentStrategyId=strategy,
        )["DeploymentNumber"]
        state = _wait(stack, client, application, environment, number)
    except (BotoCoreError, ClientError) as error:
        raise said(error, f"version {version} is stored and not deployed") from error
    return Deployed(version, state)


def _wait(
    stack: Stack, client: "AppConfigClient", application: str, environment: str, number: int
) -> str:
    for _ in range(int(WAIT_FOR_S / WAIT_S)):
        answer: Any = client.get_deployment(
            ApplicationId=application, EnvironmentId=environment, DeploymentNumber=number
        )
        state = str(answer["State"])
        if state in _HOLDS:
            return state
        if state in _ENDED:
            events = answer.get("EventLog") or [{}]
            told = events[0].get("Description", "AppConfig does not say why")
            raise CommandError(f"deployment {number} is {state}: {' '.join(str(told).split())}")
        stack.sleep(WAIT_S)
    raise CommandError(
        f"deployment {number} is not in force after {WAIT_FOR_S} s: look at AppConfig"
    )
