"""A SAM template deployed on this machine: everything that `sam deploy` gives, until `stop`."""

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config
from moto.sqs.models import sqs_backends

from local.aws.appconfig import AppConfigService
from local.aws.deployment import Deployment
from local.aws.emf import MetricSample
from local.aws.events import EventRouter, RecordedEvent
from local.aws.front import Front
from local.aws.lambda_api import LambdaApi
from local.aws.lambdas import InvokeResult, LambdaService, Report
from local.aws.pollers import waiting_messages
from local.aws.resources import Context
from local.aws.scheduler import Scheduler
from local.aws.services import EksService, PublishedMessage, SnsRecorder, StsService
from local.aws.states import Execution, StatesService
from local.aws.template import load_template
from local.aws.wiring import Wiring
from local.calls import CallLog, FaultPlan
from local.identity import Identities

_LOGGER = logging.getLogger(__name__)

_CLIENT_CONFIG = Config(
    retries={"total_max_attempts": 1}, read_timeout=900, max_pool_connections=50
)

Environment = Mapping[str, str] | Callable[[str], Mapping[str, str]]


class LocalStack:
    """One deployed template.

    Args:
        template: The SAM template.
        parameters: Values of its parameters.
        run_dir: Where the run's files go (`logs/FUNCTION.log`).
        stack_name: What `AWS::StackName` is.
        region: What `AWS::Region` is.
        identities: Shared with the other emulators, which know callers by it.
        log: Gets every AWS call.
        faults: Is asked before every AWS call.
        environment: Extra variables for every function, such as the path of a certificate; or a
            function of the endpoint's URL that returns them. The template's own win.
        runtime: `awslambdaric`, `bootstrap`, or `auto`.
        max_workers: Most processes of one function.
        async_retry_delays_s: Waits before retries of failed asynchronous invocations (AWS: 60 s
            and 120 s).
        sqs_retry_s: When a message whose handling failed becomes visible again. None: after the
            queue's visibility time-out, as on AWS.
        seconds_per_minute: The schedules' clock; None: schedules fire by `tick` only.
    """

    def __init__(
        self,
        template: Path,
        parameters: Mapping[str, str] | None = None,
        *,
        run_dir: Path,
        stack_name: str = "nodemend",
        region: str = "eu-west-1",
        identities: Identities | None = None,
        log: CallLog | None = None,
        faults: FaultPlan | None = None,
        environment: Environment | None = None,
        runtime: str = "auto",
        max_workers: int = 4,
        async_retry_delays_s: tuple[float, ...] = (1.0, 2.0),
        sqs_retry_s: float | None = 1.0,
        seconds_per_minute: float | None = None,
    ) -> None:
        self._template_path = template
        self._parameters = dict(parameters or {})
        self._stack_name = stack_name
        self._environment = environment
        self._seconds_per_minute = seconds_per_minute
        self.identities = identities or Identities()
        self.log = log or CallLog()
        self.faults = faults or FaultPlan()
        self.front = Front(
            identities=self.identities, log=self.log, faults=self.faults, region=region
        )
        self.lambdas = LambdaService(
            self.front,
            run_dir=run_dir,
            runtime=runtime,
            max_workers=max_workers,
            async_retry_delays_s=async_retry_delays_s,
        )
        self.lambda_api = LambdaApi(self.front, self.lambdas)
        self.router = EventRouter(self.front)
        self.states = StatesService(self.front, self.router)
        self.scheduler = Scheduler()
        self.topics = SnsRecorder(self.front, self.lambdas.invoke_async)
        self.eks = EksService(self.front)
        self.sts = StsService(self.front)
        self.front.kill_caller = self.kill_caller
        self.appconfig = AppConfigService(self.front, self._run_validator)
        self._wiring = Wiring(
            front=self.front,
            lambdas=self.lambdas,
            router=self.router,
            scheduler=self.scheduler,
            topics=self.topics,
            sqs_retry_s=sqs_retry_s,
        )
        self._session: Any = boto3.Session()
        self._clients: dict[tuple[str, str], Any] = {}
        self._clients_lock = threading.Lock()
        self._deployment: Deployment | None = None
        self._is_started = False
        self.outputs: dict[str, Any] = {}
        """The template's outputs, once started."""

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Deploy the template. On an error nothing is left running."""
        self.front.start()
        self._is_started = True
        try:
            self.states.start()
            environment = self._environment
            if environment is not None:
                extra = environment(self.front.url) if callable(environment) else environment
                self.lambdas.environment.update(extra)
            self._connect_targets()
            self._deploy()
        except BaseException:
            self.stop()
            raise
        for poller in self._wiring.pollers:
            poller.start()
        if self._seconds_per_minute is not None:
            self.scheduler.start_clock(self._seconds_per_minute)

    def stop(self) -> None:
        """End everything: executions, processes, threads, the port."""
        if not self._is_started:
            return
        self._is_started = False
        self.states.begin_stop()
        self.lambdas.stop()
        for poller in self._wiring.pollers:
            poller.stop()
        self.scheduler.stop()
        self.router.stop()
        self.states.finish_stop()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self.front.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- deployment ----------------------------------------------------------------------------

    def _deploy(self) -> None:
        template = load_template(self._template_path, self._parameters, self.front.region)
        context = Context(
            stack_name=self._stack_name,
            region=self.front.region,
            account_id=self.front.account_id,
            client=self._deployment_client,
            code=template.code,
        )
        deployment = Deployment(
            template, self._parameters, self._pseudo_parameters(), context, self._wiring.builders()
        )
        deployment.create_all()
        self._deployment = deployment
        self.outputs = deployment.outputs()

    def _pseudo_parameters(self) -> dict[str, str]:
        region, account = self.front.region, self.front.account_id
        stack = f"stack/{self._stack_name}/{uuid.uuid4()}"
        return {
            "AWS::AccountId": account,
            "AWS::Partition": "aws",
            "AWS::Region": region,
            "AWS::StackId": f"arn:aws:cloudformation:{region}:{account}:{stack}",
            "AWS::StackName": self._stack_name,
            "AWS::URLSuffix": "amazonaws.com",
        }

    def _deployment_client(self, name: str) -> Any:  # noqa: ANN401
        service, _, caller = name.partition("@")
        return self.client(service, caller=caller or "deployment")

    def _connect_targets(self) -> None:
        """Say how events, schedules and failure records reach their targets."""

        def to_queue(arn: str, body: bytes) -> None:
            client = self.client("sqs", caller="events")
            url = client.get_queue_url(QueueName=arn.rpartition(":")[2])["QueueUrl"]
            client.send_message(QueueUrl=url, MessageBody=body.decode())

        def to_machine(arn: str, body: bytes) -> None:
            client = self.client("stepfunctions", caller="events")
            name = f"event-{uuid.uuid4()}"
            client.start_execution(stateMachineArn=arn, name=name, input=body.decode())

        def to_topic(arn: str, body: bytes) -> None:
            self.client("sns", caller="events").publish(TopicArn=arn, Message=body.decode())

        def to_log(_arn: str, body: bytes) -> None:
            _LOGGER.info("event for a log group: %s", body.decode())

        self.router.add_target_kind("sqs", to_queue)
        self.router.add_target_kind("states", to_machine)
        self.router.add_target_kind("sns", to_topic)
        self.router.add_target_kind("logs", to_log)
        self.router.add_target_kind("lambda", lambda arn, body: _run(self.lambdas, arn, body))
        self.lambdas.on_async_failure = self.router.deliver

    def kill_caller(self, access_key_id: str) -> None:
        """Kill the function behind an access key, also one that it got by assuming a role."""
        self.lambdas.kill_worker(self.sts.origin(access_key_id))

    def _run_validator(self, function_arn: str, event: bytes) -> tuple[bytes, str | None]:
        result = self.lambdas.invoke(function_arn, event)
        return result.payload, result.function_error

    # --- what a person does --------------------------------------------------------------------

    def client(self, service: str, caller: str = "person") -> Any:  # noqa: ANN401
        """Return a boto3 client whose calls are known as the caller's; it never retries."""
        key = (service, caller)
        with self._clients_lock:  # a session may not be shared by threads
            if key not in self._clients:
                credential = self.identities.issue(caller)
                self._clients[key] = self._session.client(
                    service,
                    endpoint_url=self.front.url,
                    region_name=self.front.region,
                    aws_access_key_id=credential.access_key_id,
                    aws_secret_access_key=credential.secret_access_key,
                    aws_session_token=credential.session_token,
                    config=_CLIENT_CONFIG,
                )
            return self._clients[key]

    def resource_id(self, logical_id: str) -> str:
        """Return what `Ref` gives for a resource: a table's name, a queue's URL, an ARN."""
        return self._resources.created[logical_id].ref

    def attribute(self, logical_id: str, name: str = "Arn") -> str:
        """Return what `Fn::GetAtt` gives for a resource."""
        return str(self._resources.created[logical_id].attributes[name])

    @property
    def _resources(self) -> Deployment:
        if self._deployment is None:
            raise RuntimeError("the stack was not started")
        return self._deployment

    def _only(self, resource_type: str, what: str) -> str:
        found = self._resources.of_type(resource_type)
        if len(found) != 1:
            raise LookupError(f"the template has {len(found)} {what}; name one of {found}")
        return found[0]

    def register_cluster(self, name: str, endpoint: str, ca_pem: str) -> None:
        """Let EKS DescribeCluster answer with an emulator's address and certificate."""
        self.eks.register(name, endpoint, ca_pem)

    def deploy_policy(self, text: str, content_type: str = "application/yaml") -> int:
        """Do what two AWS CLI lines do: make a hosted version and deploy it; returns its number.

        Raises botocore's ClientError (BadRequestException) if a validator refuses it.
        """
        client = self.client("appconfig")
        profile = self.resource_id(self._only("AWS::AppConfig::ConfigurationProfile", "profiles"))
        application = self.resource_id(self._only("AWS::AppConfig::Application", "applications"))
        environment = self.resource_id(self._only("AWS::AppConfig::Environment", "environments"))
        version = client.create_hosted_configuration_version(
            ApplicationId=application,
            ConfigurationProfileId=profile,
            Content=text.encode(),
            ContentType=content_type,
        )
        version["Content"].read()  # the answer repeats it; unread, its connection stays open
        client.start_deployment(
            ApplicationId=application,
            EnvironmentId=environment,
            ConfigurationProfileId=profile,
            ConfigurationVersion=str(version["VersionNumber"]),
            DeploymentStrategyId="AppConfig.AllAtOnce",
        )
        return int(version["VersionNumber"])

    def start_execution(
        self, execution_input: object, name: str | None = None, machine: str | None = None
    ) -> str:
        """Start a state machine as a person does in the console; returns the execution's ARN.

        Args:
            execution_input: Any JSON value.
            name: The execution's name; made up if None.
            machine: Logical id; needed only if the template has several machines.
        """
        logical_id = machine or self._only("AWS::StepFunctions::StateMachine", "state machines")
        answer = self.client("stepfunctions").start_execution(
            stateMachineArn=self.resource_id(logical_id),
            name=name or str(uuid.uuid4()),
            input=json.dumps(execution_input),
        )
        return str(answer["executionArn"])

    def stop_execution(self, arn: str, error: str = "", cause: str = "") -> None:
        """Stop an execution as a person does in the console."""
        arguments = {key: value for key, value in (("error", error), ("cause", cause)) if value}
        self.client("stepfunctions").stop_execution(executionArn=arn, **arguments)

    def invoke(self, function: str, payload: object) -> Any:  # noqa: ANN401 - any JSON value
        """Run a function and return its answer; raises FunctionFailedError with its error."""
        result = self.invoke_raw(function, json.dumps(payload).encode())
        answer = json.loads(result.payload)
        if result.function_error is not None:
            raise FunctionFailedError(function, answer)
        return answer

    def invoke_raw(self, function: str, payload: bytes) -> InvokeResult:
        """Run a function (logical id, short name, name or ARN) with any payload."""
        return self.lambdas.invoke(self.lambdas.spec(function).name, payload)

    def tick(self, schedule: str) -> bool:
        """Fire a schedule (logical id or name) and wait for its run; False if it still runs."""
        return self.scheduler.tick(schedule)

    # --- what happened -------------------------------------------------------------------------

    def executions(self) -> list[Execution]:
        """Return all executions, oldest first."""
        return self.states.executions()

    def execution(self, arn: str) -> Execution:
        """Return one execution."""
        return next(one for one in self.executions() if one.arn == arn)

    def execution_history(self, arn: str) -> list[dict[str, Any]]:
        """Return the history events of an execution."""
        return self.states.history(arn)

    def events(self) -> list[RecordedEvent]:
        """Return every event that a bus accepted, AWS's own status events included."""
        return self.router.events()

    def messages(self) -> list[PublishedMessage]:
        """Return every message that was published to a topic."""
        return self.topics.messages()

    def metrics(self) -> list[MetricSample]:
        """Return all metric samples that functions wrote."""
        return self.lambdas.metrics()

    def reports(self) -> list[Report]:
        """Return duration and memory of every invocation."""
        return self.lambdas.reports()

    def logs(self, function: str) -> list[str]:
        """Return the log lines of a function."""
        return self.lambdas.logs(self.lambdas.spec(function).name)

    def queue_depth(self, logical_id: str) -> int:
        """Return how many messages a queue holds: visible, delayed and in flight."""
        name = self.attribute(logical_id, "QueueName")
        return waiting_messages(sqs_backends[self.front.account_id][self.front.region].queues[name])

    # --- waiting -------------------------------------------------------------------------------

    def wait_for_execution(self, arn: str, timeout_s: float) -> Execution:
        """Wait until an execution has ended, and return it."""
        deadline = time.monotonic() + timeout_s
        while (execution := self.execution(arn)).status == "RUNNING":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{execution.name} still runs after {timeout_s} s")
            time.sleep(0.02)
        return execution

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until nothing runs, waits or is under way; raises TimeoutError that says what is.

        Messages in queues that no function reads (dead-letter queues) do not count.
        """
        deadline = time.monotonic() + timeout_s
        quiet = 0
        while quiet < 3:  # between two stages there is a moment in which nothing is to be seen
            busy = self._busy()
            quiet = 0 if busy else quiet + 1
            if busy and time.monotonic() > deadline:
                raise TimeoutError(f"not idle after {timeout_s} s: {busy}")
            time.sleep(0.03)

    def _busy(self) -> dict[str, int]:
        queues = sqs_backends[self.front.account_id][self.front.region].queues
        counts = {
            "executions": self.states.running,
            "invocations": self.lambdas.in_flight,
            "deliveries": self.router.delivering,
            "schedules": self.scheduler.firing,
            "batches": sum(not poller.is_idle for poller in self._wiring.pollers),
            "messages": sum(waiting_messages(queues[name]) for name in self._wiring.polled_queues),
        }
        return {name: count for name, count in counts.items() if count}


class FunctionFailedError(RuntimeError):
    """A function ended with an error."""

    def __init__(self, function: str, payload: Any) -> None:  # noqa: ANN401 - any JSON value
        self.error_type = str((payload or {}).get("errorType", ""))
        self.error_message = str((payload or {}).get("errorMessage", ""))
        self.payload = payload
        super().__init__(f"{function}: {self.error_type}: {self.error_message}")


def _run(lambdas: LambdaService, arn: str, body: bytes) -> None:
    lambdas.invoke_async(arn, body)
