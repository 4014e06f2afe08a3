"""Creates the template's resources, type by type. An unknown type is an error."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local.aws.template import TemplateError, substitute_definition

Properties = dict[str, Any]


@dataclass(frozen=True)
class Created:
    """A resource that exists: what `Ref` and `Fn::GetAtt` give."""

    ref: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What the builders need of the stack."""

    stack_name: str
    region: str
    account_id: str
    client: Callable[[str], Any]
    """A boto3 client of the deploying person."""
    code: Mapping[str, Path]

    def arn(self, service: str, resource: str, *, region: str | None = None) -> str:
        """Return an ARN of this account."""
        where = self.region if region is None else region
        return f"arn:aws:{service}:{where}:{self.account_id}:{resource}"


Builder = Callable[[Context, str, Properties], Created]
BUILDERS: dict[str, Builder] = {}


def builds(*types: str) -> Callable[[Builder], Builder]:
    """Register a builder for resource types."""

    def register(builder: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(types, builder))
        return builder

    return register


def physical_name(context: Context, logical_id: str, given: object) -> str:
    """Return the given name, or one like CloudFormation's without the random end."""
    return str(given) if given else f"{context.stack_name}-{logical_id}"


# --- kept as data: nothing on the laptop acts on them --------------------------------------------


@builds("AWS::IAM::Role")
def _role(context: Context, logical_id: str, properties: Properties) -> Created:
    name = physical_name(context, logical_id, properties.get("RoleName"))
    path = properties.get("Path", "/")
    arn = context.arn("iam", f"role{path}{name}", region="")
    return Created(name, {"Arn": arn, "RoleId": f"AROA{name.upper()[:16]}"})


@builds("AWS::IAM::ManagedPolicy")
def _managed_policy(context: Context, logical_id: str, properties: Properties) -> Created:
    name = physical_name(context, logical_id, properties.get("ManagedPolicyName"))
    arn = context.arn("iam", f"policy/{name}", region="")
    return Created(arn, {"PolicyArn": arn})


@builds(
    "AWS::CloudWatch::Alarm",
    "AWS::CloudWatch::CompositeAlarm",
)
def _alarm(context: Context, logical_id: str, properties: Properties) -> Created:
    name = physical_name(context, logical_id, properties.get("AlarmName"))
    return Created(name, {"Arn": context.arn("cloudwatch", f"alarm:{name}")})


@builds("AWS::KMS::Key")
def _key(context: Context, logical_id: str, _properties: Properties) -> Created:
    return Created(
        logical_id, {"Arn": context.arn("kms", f"key/{logical_id}"), "KeyId": logical_id}
    )


@builds(
    "AWS::CloudWatch::Dashboard",
    "AWS::Events::EventBusPolicy",
    "AWS::IAM::Policy",
    "AWS::IAM::RolePolicy",
    "AWS::KMS::Alias",
    "AWS::Lambda::Permission",
    "AWS::Logs::MetricFilter",
    "AWS::Logs::SubscriptionFilter",
    "AWS::Scheduler::ScheduleGroup",
    "AWS::SNS::TopicPolicy",
    "AWS::SQS::QueuePolicy",
)
def _data(context: Context, logical_id: str, _properties: Properties) -> Created:
    return Created(physical_name(context, logical_id, None))


# --- queues, topics, tables, buses ---------------------------------------------------------------

_QUEUE_ATTRIBUTES = (
    "DelaySeconds",
    "MaximumMessageSize",
    "MessageRetentionPeriod",
    "ReceiveMessageWaitTimeSeconds",
    "VisibilityTimeout",
    "FifoQueue",
    "ContentBasedDeduplication",
    "KmsMasterKeyId",
    "SqsManagedSseEnabled",
)


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON value
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(value)


@builds("AWS::SQS::Queue")
def _queue(context: Context, logical_id: str, properties: Properties) -> Created:
    name = physical_name(context, logical_id, properties.get("QueueName"))
    if properties.get("FifoQueue") in (True, "true") and not name.endswith(".fifo"):
        name += ".fifo"
    names = (*_QUEUE_ATTRIBUTES, "RedrivePolicy", "RedriveAllowPolicy")
    attributes = {key: _text(properties[key]) for key in names if key in properties}
    url = context.client("sqs").create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
    return Created(url, {"Arn": context.arn("sqs", name), "QueueName": name, "QueueUrl": url})


@builds("AWS::SNS::Topic")
def _topic(context: Context, logical_id: str, properties: Properties) -> Created:
    name = physical_name(context, logical_id, properties.get("TopicName"))
    arn = context.client("sns").create_topic(Name=name)["TopicArn"]
    return Created(arn, {"TopicArn": arn, "TopicName": name})


@builds("AWS::DynamoDB::Table")
def _table(context: Context, logical_id: str, properties: Properties) -> Created:
    name = physical_name(context, logical_id, properties.get("TableName"))
    client = context.client("dynamodb")
    names = (
        "AttributeDefinitions",
        "KeySchema",
        "BillingMode",
        "ProvisionedThroughput",
        "GlobalSecondaryIndexes",
        "LocalSecondaryIndexes",
    )
    arguments = {key: properties[key] for key in names if key in properties}
    if "ProvisionedThroughput" not in arguments:
        arguments["BillingMode"] = "PAY_PER_REQUEST"
    client.create_table(TableName=name, **arguments)
    if "TimeToLiveSpecification" in properties:
        client.update_time_to_live(
            TableName=name, TimeToLiveSpecification=properties["TimeToLiveSpecification"]
        )
    return Created(name, {"Arn": context.arn("dynamodb", f"table/{name}")})


@builds("AWS::Events::EventBus")
def _bus(context: Context, logical_id: str, properties: Properties) -> Created:
    name = physical_name(context, logical_id, properties.get("Name"))
    arn = context.client("events").create_event_bus(Name=name)["EventBusArn"]
    return Created(name, {"Arn": arn, "Name": name})


@builds("AWS::Logs::LogGroup")
def _log_group(context: Context, logical_id: str, properties: Properties) -> Created:
    name = physical_name(context, logical_id, properties.get("LogGroupName"))
    context.client("logs").create_log_group(logGroupName=name)
    return Created(name, {"Arn": context.arn("logs", f"log-group:{name}:*")})


@builds("AWS::SSM::Parameter")
def _ssm_parameter(context: Context, logical_id: str, properties: Properties) -> Created:
    name = physical_name(context, logical_id, properties.get("Name"))
    context.client("ssm").put_parameter(
        Name=name, Value=properties["Value"], Type=properties.get("Type", "String")
    )
    return Created(name, {"Type": properties.get("Type", "String"), "Value": properties["Value"]})


# --- AppConfig -----------------------------------------------------------------------------------


@builds("AWS::AppConfig::Application")
def _application(context: Context, _logical_id: str, properties: Properties) -> Created:
    answer = context.client("appconfig").create_application(Name=properties["Name"])
    return Created(answer["Id"], {"ApplicationId": answer["Id"]})


@builds("AWS::AppConfig::Environment")
def _environment(context: Context, _logical_id: str, properties: Properties) -> Created:
    answer = context.client("appconfig").create_environment(
        ApplicationId=properties["ApplicationId"],
        Name=properties["Name"],
        Monitors=properties.get("Monitors", []),
    )
    return Created(answer["Id"], {"EnvironmentId": answer["Id"]})


@builds("AWS::AppConfig::ConfigurationProfile")
def _profile(context: Context, _logical_id: str, properties: Properties) -> Created:
    answer = context.client("appconfig").create_configuration_profile(
        ApplicationId=properties["ApplicationId"],
        Name=properties["Name"],
        LocationUri=properties["LocationUri"],
        Type=properties.get("Type", "AWS.Freeform"),
        Validators=properties.get("Validators", []),
    )
    return Created(answer["Id"], {"ConfigurationProfileId": answer["Id"]})


@builds("AWS::AppConfig::DeploymentStrategy")
def _strategy(context: Context, _logical_id: str, properties: Properties) -> Created:
    answer = context.client("appconfig").create_deployment_strategy(
        Name=properties["Name"],
        DeploymentDurationInMinutes=int(properties["DeploymentDurationInMinutes"]),
        GrowthFactor=float(properties["GrowthFactor"]),
        ReplicateTo=properties["ReplicateTo"],
        FinalBakeTimeInMinutes=int(properties.get("FinalBakeTimeInMinutes", 0)),
    )
    return Created(answer["Id"], {"Id": answer["Id"]})


@builds("AWS::AppConfig::HostedConfigurationVersion")
def _hosted_version(context: Context, _logical_id: str, properties: Properties) -> Created:
    answer = context.client("appconfig").create_hosted_configuration_version(
        ApplicationId=properties["ApplicationId"],
        ConfigurationProfileId=properties["ConfigurationProfileId"],
        Content=properties["Content"].encode(),
        ContentType=properties["ContentType"],
    )
    answer["Content"].read()  # unread, its connection stays open
    number = str(answer["VersionNumber"])
    return Created(number, {"VersionNumber": number})


@builds("AWS::AppConfig::Deployment")
def _deployment(context: Context, _logical_id: str, properties: Properties) -> Created:
    answer = context.client("appconfig").start_deployment(
        ApplicationId=properties["ApplicationId"],
        EnvironmentId=properties["EnvironmentId"],
        DeploymentStrategyId=properties["DeploymentStrategyId"],
        ConfigurationProfileId=properties["ConfigurationProfileId"],
        ConfigurationVersion=str(properties["ConfigurationVersion"]),
    )
    number = str(answer["DeploymentNumber"])
    return Created(number, {"DeploymentNumber": number})


# --- state machines ------------------------------------------------------------------------------


@builds("AWS::StepFunctions::StateMachine")
def _state_machine(context: Context, logical_id: str, properties: Properties) -> Created:
    name = physical_name(context, logical_id, properties.get("StateMachineName"))
    definition = properties.get("DefinitionString")
    if definition is None:
        definition = json.dumps(properties.get("Definition"))
    substitutions = properties.get("DefinitionSubstitutions", {})
    text = substitute_definition(definition, substitutions, logical_id)
    try:
        json.loads(text)
    except ValueError as error:
        raise TemplateError(f"{logical_id}: the definition is not JSON: {error}") from error
    answer = context.client("stepfunctions").create_state_machine(
        name=name,
        definition=text,
        roleArn=properties["RoleArn"],
        type=properties.get("StateMachineType") or properties.get("Type") or "STANDARD",
    )
    arn = answer["stateMachineArn"]
    return Created(arn, {"Arn": arn, "Name": name})
