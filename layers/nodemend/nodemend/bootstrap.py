"""The composition root: builds the adapters, lazily, once per container.

The only place where settings, adapters and use cases meet. Tests build the same ports with fakes.
"""

from functools import cache
from typing import TYPE_CHECKING, Protocol

import boto3

from nodemend.adapters._aws import client_config
from nodemend.adapters.amp import AmpMetrics
from nodemend.adapters.capacity_asg import AutoScalingCapacity
from nodemend.adapters.cluster_role import ClusterRole
from nodemend.adapters.dead_letters_sqs import SqsDeadLetters
from nodemend.adapters.dispatch_queue_sqs import SqsDispatchQueue
from nodemend.adapters.eks_auth import EksAccess
from nodemend.adapters.event_bus import EventBridgeBus
from nodemend.adapters.executions_stepfunctions import StepFunctionsExecutions
from nodemend.adapters.guard_dynamodb import DynamoGuards
from nodemend.adapters.history_dynamodb import DynamoHistory
from nodemend.adapters.incidents_dynamodb import DynamoIncidents
from nodemend.adapters.instances_ec2 import Ec2Instances
from nodemend.adapters.kubernetes_cluster import KubernetesClusters
from nodemend.adapters.outbox import DynamoOutbox
from nodemend.adapters.policy_appconfig import AppConfigPolicies
from nodemend.adapters.scan_memory_dynamodb import DynamoScanMemory
from nodemend.adapters.system import LambdaInvocation, SystemClock, UlidIds
from nodemend.adapters.telemetry_emf import EmfTelemetry
from nodemend.application.answer_approval import AnswerApprovalPorts
from nodemend.application.close_incident import ClosePorts
from nodemend.application.closing import ClosingPorts
from nodemend.application.dispatch_incidents import DispatchPorts
from nodemend.application.open_incident import OpenIncidentPorts
from nodemend.application.receive_alert import ReceiveAlertPorts
from nodemend.application.scan_gpu_health import ScanPorts
from nodemend.application.set_pause import SetPausePorts
from nodemend.application.start_repair import RepairPorts
from nodemend.application.steps import StepPorts
from nodemend.application.verify_fault import VerifyPorts
from nodemend.application.watching import WatchPorts
from nodemend.catalogue import load_catalogue
from nodemend.contracts.policy import check_rules, parse_policy
from nodemend.domain.policy import Policy
from nodemend.domain.rules import Catalogue
from nodemend.settings import (
    AlertSettings,
    DispatchSettings,
    MetricsSettings,
    PolicySettings,
    QueueSettings,
    RecordSettings,
    RuntimeSettings,
)

if TYPE_CHECKING:
    from mypy_boto3_appconfigdata.client import AppConfigDataClient
    from mypy_boto3_dynamodb.client import DynamoDBClient
    from mypy_boto3_events.client import EventBridgeClient
    from mypy_boto3_sqs.client import SQSClient
    from mypy_boto3_stepfunctions.client import SFNClient

_clock = SystemClock()

SCAN_S = 50.0
"""For the queries of one run: the functions end after 60 s."""
SIGHT_S = 15.0
"""For the question whether the rules can see."""


class Context(Protocol):
    """What is needed of Lambda's context object."""

    def get_remaining_time_in_millis(self) -> int:
        """Return how long this invocation may still run."""
        ...


@cache
def _session() -> boto3.Session:
    return boto3.Session()


@cache
def _dynamodb() -> "DynamoDBClient":
    return _session().client("dynamodb", config=client_config())


@cache
def _events() -> "EventBridgeClient":
    return _session().client("events", config=client_config())


@cache
def _sqs() -> "SQSClient":
    return _session().client("sqs", config=client_config())


@cache
def _stepfunctions() -> "SFNClient":
    return _session().client("stepfunctions", config=client_config())


@cache
def _appconfigdata() -> "AppConfigDataClient":
    return _session().client("appconfigdata", config=client_config())


@cache
def _records() -> RecordSettings:
    return RecordSettings()


@cache
def _policy_settings() -> PolicySettings:
    return PolicySettings()


@cache
def catalogue() -> Catalogue:
    """Return the detection data of the package."""
    return load_catalogue()


def parse_deployed_policy(document: object, version: str) -> Policy:
    """Parse a policy document against the catalogue; also what validate_policy runs.

    Raises:
        PolicyInvalidError: naming each wrong field and what would be right.
    """
    policy = parse_policy(document, version)
    check_rules(policy, {rule.id: tuple(rule.thresholds) for rule in catalogue().rules})
    return policy.with_cluster_roles(_policy_settings().cluster_role_prefix)


@cache
def _policies() -> AppConfigPolicies:
    settings = _policy_settings()
    default = settings.default_cluster()
    prefix = settings.cluster_role_prefix
    return AppConfigPolicies(
        application=settings.appconfig_application,
        environment=settings.appconfig_environment,
        profile=settings.appconfig_profile,
        client=_appconfigdata(),
        parse=parse_deployed_policy,
        clock=_clock,
        default_cluster=default.with_role(prefix) if default else None,
    )


@cache
def _telemetry() -> EmfTelemetry:
    return EmfTelemetry()


@cache
def _bus() -> EventBridgeBus:
    return EventBridgeBus(bus_name=_records().bus, client=_events(), telemetry=_telemetry())


@cache
def _incidents() -> DynamoIncidents:
    return DynamoIncidents(table=_records().table, client=_dynamodb(), clock=_clock)


@cache
def _outbox() -> DynamoOutbox:
    return DynamoOutbox(
        table=_records().table, client=_dynamodb(), bus=_bus(), telemetry=_telemetry()
    )


@cache
def _guards() -> DynamoGuards:
    return DynamoGuards(table=_records().table, client=_dynamodb())


@cache
def _cluster_role() -> ClusterRole:
    return ClusterRole(
        session=_session(), role_session_name=RuntimeSettings().aws_lambda_function_name
    )


@cache
def _clusters() -> KubernetesClusters:
    return KubernetesClusters(
        access=EksAccess(session_for=_cluster_role().session_for, clock=_clock),
        clock=_clock,
        gpu_instance_types=frozenset(catalogue().gpus_by_instance_type),
    )


@cache
def _capacity() -> AutoScalingCapacity:
    return AutoScalingCapacity(
        session_for=_cluster_role().session_for,
        gpu_instance_types=frozenset(catalogue().gpus_by_instance_type),
    )


@cache
def _instances() -> Ec2Instances:
    return Ec2Instances(session_for=_cluster_role().session_for)


@cache
def _history() -> DynamoHistory:
    return DynamoHistory(table=_records().table, client=_dynamodb(), clock=_clock)


@cache
def _metrics(budget_s: float = SCAN_S) -> AmpMetrics:
    credentials = _session().get_credentials()
    if credentials is None:  # pragma: no cover - the Lambda runtime always has some
        raise RuntimeError("the function has no AWS credentials")
    limit = MetricsSettings().max_query_samples
    return AmpMetrics(
        credentials=credentials,
        endpoint_url=RuntimeSettings().aws_endpoint_url,
        budget_s=budget_s,
        max_samples_error_threshold=limit or None,
        max_samples_warning_threshold=limit * 4 // 5 or None,
    )


@cache
def _dispatch_queue() -> SqsDispatchQueue:
    settings = QueueSettings()
    return SqsDispatchQueue(queue_url=settings.dispatch_queue_url, client=_sqs())


@cache
def _dead_letters() -> SqsDeadLetters:
    return SqsDeadLetters(queue_url=AlertSettings().alert_dead_letters_url, client=_sqs())


@cache
def _executions() -> StepFunctionsExecutions:
    settings = DispatchSettings()
    return StepFunctionsExecutions(
        state_machine_arn=settings.state_machine_arn, client=_stepfunctions()
    )


def scan_ports() -> ScanPorts:
    """Return the ports of scan_gpu_health."""
    return ScanPorts(
        metrics=_metrics(),
        sight=_metrics(budget_s=SIGHT_S),
        policies=_policies(),
        bus=_bus(),
        memory=DynamoScanMemory(table=_records().table, client=_dynamodb(), clock=_clock),
        guards=_guards(),
        telemetry=_telemetry(),
        catalogue=catalogue(),
        clock=_clock,
    )


def receive_alert_ports() -> ReceiveAlertPorts:
    """Return the ports of receive_alert."""
    return ReceiveAlertPorts(
        metrics=_metrics(),
        policies=_policies(),
        bus=_bus(),
        memory=DynamoScanMemory(table=_records().table, client=_dynamodb(), clock=_clock),
        guards=_guards(),
        incidents=_incidents(),
        outbox=_outbox(),
        dead_letters=_dead_letters(),
        telemetry=_telemetry(),
        catalogue=catalogue(),
        clock=_clock,
    )


def open_incident_ports() -> OpenIncidentPorts:
    """Return the ports of open_incident."""
    return OpenIncidentPorts(
        incidents=_incidents(),
        outbox=_outbox(),
        policies=_policies(),
        clusters=_clusters(),
        dispatch_queue=_dispatch_queue(),
        telemetry=_telemetry(),
        ids=UlidIds(),
        clock=_clock,
        history=_history(),
    )


def dispatch_ports() -> DispatchPorts:
    """Return the ports of dispatch_incidents and admit_remediation."""
    return DispatchPorts(
        incidents=_incidents(),
        outbox=_outbox(),
        guards=_guards(),
        policies=_policies(),
        clusters=_clusters(),
        capacity=_capacity(),
        executions=_executions(),
        dispatch_queue=_dispatch_queue(),
        bus=_bus(),
        telemetry=_telemetry(),
        clock=_clock,
        catalogue=catalogue(),
        history=_history(),
    )


def step_ports(context: Context) -> StepPorts:
    """Return the ports that every step of the state machine needs."""
    return StepPorts(
        incidents=_incidents(),
        outbox=_outbox(),
        guards=_guards(),
        policies=_policies(),
        clusters=_clusters(),
        clock=_clock,
        invocation=LambdaInvocation(context.get_remaining_time_in_millis),
    )


def verify_ports(context: Context) -> VerifyPorts:
    """Return the ports of verify_fault, request_approval and validate_node."""
    return VerifyPorts(
        step=step_ports(context),
        metrics=_metrics(),
        capacity=_capacity(),
        catalogue=catalogue(),
    )


def repair_ports(context: Context) -> RepairPorts:
    """Return the ports of start_repair and check_repair."""
    return RepairPorts(step=step_ports(context), capacity=_capacity(), instances=_instances())


def _closing_ports() -> ClosingPorts:
    return ClosingPorts(
        incidents=_incidents(),
        outbox=_outbox(),
        guards=_guards(),
        dispatch_queue=_dispatch_queue(),
        history=_history(),
    )


def close_ports() -> ClosePorts:
    """Return the ports of close_incident."""
    return ClosePorts(closing=_closing_ports(), clock=_clock)


def set_pause_ports() -> SetPausePorts:
    """Return the ports of set_pause."""
    return SetPausePorts(
        guards=_guards(),
        policies=_policies(),
        bus=_bus(),
        dispatch_queue=_dispatch_queue(),
        clock=_clock,
    )


def answer_approval_ports() -> AnswerApprovalPorts:
    """Return the ports of answer_approval."""
    return AnswerApprovalPorts(incidents=_incidents(), outbox=_outbox(), clock=_clock)


def watch_ports() -> WatchPorts:
    """Return the ports of watch_incidents."""
    return WatchPorts(
        closing=_closing_ports(),
        policies=_policies(),
        executions=_executions(),
        clusters=_clusters(),
        bus=_bus(),
        memory=DynamoScanMemory(table=_records().table, client=_dynamodb(), clock=_clock),
        telemetry=_telemetry(),
        clock=_clock,
    )
