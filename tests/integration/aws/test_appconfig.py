"""AppConfig: deployments with a validator, and the data plane's tokens."""

import json

import pytest
from botocore.exceptions import ClientError

from local.aws.stack import LocalStack
from local.calls import ApiFault


def open_session(stack: LocalStack, **extra: object) -> str:
    answer = stack.client("appconfigdata").start_configuration_session(
        ApplicationIdentifier="nodemend",
        EnvironmentIdentifier="live",
        ConfigurationProfileIdentifier="policy",
        **extra,
    )
    token: str = answer["InitialConfigurationToken"]
    return token


def poll(stack: LocalStack, token: str) -> tuple[str, str]:
    answer = stack.client("appconfigdata").get_latest_configuration(ConfigurationToken=token)
    return answer["Configuration"].read().decode(), answer["NextPollConfigurationToken"]


def test_before_the_first_deployment_there_is_nothing_to_find(stack):
    token = open_session(stack)

    with pytest.raises(ClientError, match="ResourceNotFoundException"):
        poll(stack, token)


def test_a_policy_is_deployed_and_read_and_an_unchanged_one_is_empty(stack):
    number = stack.deploy_policy("mode: dry_run")

    content, token = poll(stack, open_session(stack))
    again, token = poll(stack, token)
    assert (content, again) == ("mode: dry_run", "")

    assert stack.deploy_policy("mode: enforce") == number + 1
    content, _ = poll(stack, token)
    assert content == "mode: enforce"


def test_a_policy_that_the_validator_refuses_changes_nothing(stack):
    stack.deploy_policy("mode: cordon_only")

    with pytest.raises(ClientError, match="BadRequestException") as caught:
        stack.deploy_policy("nothing: here")

    assert "BadPolicyError" in str(caught.value)
    assert poll(stack, open_session(stack))[0] == "mode: cordon_only"


def test_a_token_serves_one_call(stack):
    stack.deploy_policy("mode: dry_run")
    token = open_session(stack)
    poll(stack, token)

    with pytest.raises(ClientError, match="BadRequestException"):
        poll(stack, token)


def test_an_answer_that_is_lost_takes_its_token_with_it(stack):
    stack.deploy_policy("mode: dry_run")
    token = open_session(stack)
    stack.faults.add(
        ApiFault("GetLatestConfiguration", 500, times=1, headers={"x-local-when": "after"})
    )

    with pytest.raises(ClientError, match="InternalServerError"):
        poll(stack, token)
    with pytest.raises(ClientError, match="BadRequestException"):
        poll(stack, token)
    assert poll(stack, open_session(stack))[0] == "mode: dry_run"


def test_a_session_may_ask_for_a_minimum_interval(stack):
    stack.deploy_policy("mode: dry_run")
    _, token = poll(stack, open_session(stack, RequiredMinimumPollIntervalInSeconds=15))

    with pytest.raises(ClientError, match="PollIntervalNotSatisfied"):
        poll(stack, token)


def test_deployments_and_versions_can_be_looked_up_by_name(stack):
    number = stack.deploy_policy("mode: enforce")
    client = stack.client("appconfig")
    application = stack.resource_id("PolicyApplication")
    environment = stack.resource_id("PolicyEnvironment")
    profile = stack.resource_id("PolicyProfile")

    names = [one["Name"] for one in client.list_applications()["Items"]]
    deployments = client.list_deployments(ApplicationId=application, EnvironmentId=environment)[
        "Items"
    ]
    latest = client.get_deployment(
        ApplicationId=application,
        EnvironmentId=environment,
        DeploymentNumber=deployments[0]["DeploymentNumber"],
    )
    version = client.get_hosted_configuration_version(
        ApplicationId=application, ConfigurationProfileId=profile, VersionNumber=number
    )

    assert names == ["nodemend"]
    assert latest["State"] == "COMPLETE"
    assert latest["ConfigurationVersion"] == str(number)
    assert version["Content"].read() == b"mode: enforce"
    assert (
        client.list_hosted_configuration_versions(
            ApplicationId=application, ConfigurationProfileId=profile
        )["Items"][0]["VersionNumber"]
        == number
    )


def test_a_schema_validator_checks_json(stack):
    client = stack.client("appconfig")
    application = stack.resource_id("PolicyApplication")
    schema = json.dumps({"type": "object", "required": ["mode"]})
    profile = client.create_configuration_profile(
        ApplicationId=application,
        Name="checked",
        LocationUri="hosted",
        Validators=[{"Type": "JSON_SCHEMA", "Content": schema}],
    )["Id"]
    version = client.create_hosted_configuration_version(
        ApplicationId=application,
        ConfigurationProfileId=profile,
        Content=b"{}",
        ContentType="application/json",
    )
    assert version["Content"].read() == b"{}"

    with pytest.raises(ClientError, match="'mode' is a required property"):
        client.start_deployment(
            ApplicationId=application,
            EnvironmentId=stack.resource_id("PolicyEnvironment"),
            ConfigurationProfileId=profile,
            ConfigurationVersion=str(version["VersionNumber"]),
            DeploymentStrategyId=stack.resource_id("PolicyStrategy"),
        )


def test_a_stale_latest_version_number_is_a_conflict(stack):
    stack.deploy_policy("mode: dry_run")

    with pytest.raises(ClientError, match="ConflictException"):
        stack.client("appconfig").create_hosted_configuration_version(
            ApplicationId=stack.resource_id("PolicyApplication"),
            ConfigurationProfileId=stack.resource_id("PolicyProfile"),
            Content=b"x",
            ContentType="text/plain",
            LatestVersionNumber=0,
        )
