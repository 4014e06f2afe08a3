"""Creates what connects resources: functions, mappings, rules, schedules, subscriptions."""

import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from local.aws.events import EventRouter
from local.aws.front import Front
from local.aws.lambdas import AsyncConfig, FunctionSpec, LambdaService
from local.aws.pollers import QueueMapping, QueuePoller
from local.aws.resources import BUILDERS, Builder, Context, Created, Properties, physical_name
from local.aws.scheduler import Schedule, Scheduler
from local.aws.services import SnsRecorder
from local.aws.template import TemplateError


def short_name(logical_id: str, function_name: str, stack_name: str) -> str:
    """Return how records of calls name a function.

    Its `FunctionName` without the stack's name in front; without one, the logical id in snake
    case without `Function` at its end: `DrainNodeFunction` is `drain_node`.
    """
    if function_name:
        return function_name.removeprefix(f"{stack_name}-").replace("-", "_")
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in logical_id)
    return words.strip("_").removesuffix("_function") or logical_id


class Wiring:
    """Builders that need the emulated services, not only their API."""

    def __init__(
        self,
        *,
        front: Front,
        lambdas: LambdaService,
        router: EventRouter,
        scheduler: Scheduler,
        topics: SnsRecorder,
        sqs_retry_s: float | None,
    ) -> None:
        self._front = front
        self._lambdas = lambdas
        self._router = router
        self._scheduler = scheduler
        self._topics = topics
        self._sqs_retry_s = sqs_retry_s
        self._layers: dict[str, Path] = {}
        self.pollers: list[QueuePoller] = []
        self.polled_queues: set[str] = set()
        """Names of the queues that a function reads."""

    def builders(self) -> Mapping[str, Builder]:
        """Return all builders by resource type."""
        return {
            **BUILDERS,
            "AWS::Lambda::Function": self._function,
            "AWS::Lambda::LayerVersion": self._layer,
            "AWS::Lambda::EventInvokeConfig": self._event_invoke_config,
            "AWS::Lambda::EventSourceMapping": self._event_source_mapping,
            "AWS::Lambda::Version": self._version,
            "AWS::Events::Rule": self._rule,
            "AWS::Scheduler::Schedule": self._schedule,
            "AWS::SNS::Subscription": self._subscription,
        }

    # --- functions -----------------------------------------------------------------------------

    def _layer(self, context: Context, logical_id: str, properties: Properties) -> Created:
        name = str(properties.get("LayerName") or logical_id)
        arn = context.arn("lambda", f"layer:{name}:1")
        folder = context.code[properties["Content"]["S3Key"]]
        # A built layer has its packages in `python/`; a source folder has them at its top.
        built = folder / "python"
        self._layers[arn] = built if built.is_dir() else folder
        return Created(arn, {"LayerVersionArn": arn})

    def _function(self, context: Context, logical_id: str, properties: Properties) -> Created:
        given = str(properties.get("FunctionName") or "")
        name = physical_name(context, logical_id, given)
        code = properties.get("Code", {})
        if code.get("S3Key") not in context.code:
            raise TemplateError(f"{logical_id}: only code in a local folder can be run")
        runtime = str(properties.get("Runtime", ""))
        if not runtime.startswith("python"):
            raise TemplateError(f"{logical_id}: runtime {runtime!r} cannot be run here")
        unknown = [arn for arn in properties.get("Layers", ()) if arn not in self._layers]
        if unknown:
            raise TemplateError(f"{logical_id}: layers from elsewhere cannot be run: {unknown}")
        variables = properties.get("Environment", {}).get("Variables", {})
        reserved = properties.get("ReservedConcurrentExecutions")
        logging_config = properties.get("LoggingConfig", {})
        spec = FunctionSpec(
            logical_id=logical_id,
            name=name,
            short_name=short_name(logical_id, given, context.stack_name),
            arn=context.arn("lambda", f"function:{name}"),
            handler=properties["Handler"],
            code=context.code[code["S3Key"]],
            layers=tuple(self._layers[arn] for arn in properties.get("Layers", ())),
            environment={key: _variable(value) for key, value in variables.items()},
            timeout_s=float(properties.get("Timeout", 3)),
            memory_mb=int(properties.get("MemorySize", 128)),
            runtime=runtime,
            reserved_concurrency=None if reserved is None else int(reserved),
            log_group=logging_config.get("LogGroup", ""),
            json_logs=logging_config.get("LogFormat") == "JSON",
            log_level=logging_config.get("ApplicationLogLevel", ""),
            role_arn=properties.get("Role", ""),
            dead_letter_arn=properties.get("DeadLetterConfig", {}).get("TargetArn", ""),
        )
        self._lambdas.create(spec)
        return Created(name, {"Arn": spec.arn})

    def _version(self, context: Context, logical_id: str, properties: Properties) -> Created:
        function = str(properties["FunctionName"]).rpartition(":")[2]
        arn = context.arn("lambda", f"function:{function}:1")
        return Created(arn, {"Version": "1", "FunctionArn": arn})

    def _event_invoke_config(
        self, context: Context, logical_id: str, properties: Properties
    ) -> Created:
        destination = properties.get("DestinationConfig", {}).get("OnFailure", {})
        config = AsyncConfig(
            maximum_retry_attempts=int(properties.get("MaximumRetryAttempts", 2)),
            on_failure_arn=destination.get("Destination", ""),
        )
        self._lambdas.configure_async(properties["FunctionName"], config)
        return Created(physical_name(context, logical_id, None))

    def _event_source_mapping(
        self, context: Context, logical_id: str, properties: Properties
    ) -> Created:
        queue_arn = str(properties.get("EventSourceArn", ""))
        if queue_arn.split(":")[2:3] != ["sqs"]:
            raise TemplateError(f"{logical_id}: only queues can be event sources, not {queue_arn}")
        queue_name = queue_arn.rpartition(":")[2]
        queue_url = context.client("sqs").get_queue_url(QueueName=queue_name)["QueueUrl"]
        size = int(properties.get("BatchSize", 10))
        window_s = float(properties.get("MaximumBatchingWindowInSeconds", 0))
        if size > 10 and window_s < 1:
            raise TemplateError(f"{logical_id}: a batch over 10 needs a batching window of 1 s")
        mapping = QueueMapping(
            function_name=properties["FunctionName"],
            queue_arn=queue_arn,
            queue_url=queue_url,
            batch_size=size,
            window_s=window_s,
            reports_item_failures="ReportBatchItemFailures"
            in properties.get("FunctionResponseTypes", ()),
            concurrency=int(properties.get("ScalingConfig", {}).get("MaximumConcurrency", 2)),
            filters=[
                json.loads(entry["Pattern"])
                for entry in properties.get("FilterCriteria", {}).get("Filters", ())
            ],
        )
        self._check_visibility(context, logical_id, mapping)
        poller = QueuePoller(
            self._front, self._lambdas, mapping, context.client("sqs@lambda"), self._sqs_retry_s
        )
        poller.enabled = properties.get("Enabled", True) not in (False, "false")
        self.pollers.append(poller)
        self.polled_queues.add(queue_name)
        mapping_id = str(uuid.uuid4())
        return Created(mapping_id, {"Id": mapping_id})

    def _check_visibility(self, context: Context, logical_id: str, mapping: QueueMapping) -> None:
        """Refuse what Lambda refuses: a message would come back while it is being handled."""
        answer = context.client("sqs").get_queue_attributes(
            QueueUrl=mapping.queue_url, AttributeNames=["VisibilityTimeout"]
        )
        visibility_s = float(answer["Attributes"]["VisibilityTimeout"])
        timeout_s = self._lambdas.spec(mapping.function_name).timeout_s
        if visibility_s < timeout_s:
            raise TemplateError(
                f"{logical_id}: the queue's visibility time-out ({visibility_s:g} s) is less than "
                f"the function's time-out ({timeout_s:g} s)"
            )

    # --- rules, schedules, subscriptions -------------------------------------------------------

    def _rule(self, context: Context, logical_id: str, properties: Properties) -> Created:
        name = physical_name(context, logical_id, properties.get("Name"))
        bus = str(properties.get("EventBusName") or "default").rpartition("/")[2]
        targets = properties.get("Targets", [])
        for target in targets:
            if "InputPath" in target:
                raise TemplateError(f"{logical_id}: InputPath is not supported here")
            if not self._router.supports(target["Arn"]):
                raise TemplateError(f"{logical_id}: events cannot be sent to {target['Arn']}")
        state = properties.get("State", "ENABLED")
        if "ScheduleExpression" in properties:
            for target in targets:
                self._add_schedule(
                    logical_id, name, properties["ScheduleExpression"], state, target
                )
        client = context.client("events")
        arguments = {"EventBusName": bus} if bus != "default" else {}
        if "EventPattern" in properties:
            pattern = json.dumps(properties["EventPattern"])
            client.put_rule(Name=name, EventPattern=pattern, State=state, **arguments)
            if targets:
                client.put_targets(Rule=name, Targets=targets, **arguments)
        path = name if bus == "default" else f"{bus}/{name}"
        return Created(name, {"Arn": context.arn("events", f"rule/{path}")})

    def _schedule(self, context: Context, logical_id: str, properties: Properties) -> Created:
        name = physical_name(context, logical_id, properties.get("Name"))
        target = properties["Target"]
        if not self._router.supports(target["Arn"]):
            raise TemplateError(f"{logical_id}: a schedule cannot be sent to {target['Arn']}")
        state = properties.get("State", "ENABLED")
        self._add_schedule(logical_id, name, properties["ScheduleExpression"], state, target)
        group = properties.get("GroupName", "default")
        return Created(name, {"Arn": context.arn("scheduler", f"schedule/{group}/{name}")})

    def _add_schedule(
        self, logical_id: str, name: str, expression: str, state: str, target: dict[str, Any]
    ) -> None:
        run = partial(self._run_schedule, name, target)
        self._scheduler.add(Schedule(logical_id, name, expression, run, enabled=state == "ENABLED"))

    def _run_schedule(self, name: str, target: dict[str, Any]) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = target.get("Input") or json.dumps({"time": now, "source": "aws.scheduler"})
        for placeholder, value in {
            "scheduled-time": now,
            "execution-id": str(uuid.uuid4()),
            "schedule-arn": name,
            "attempt-number": "1",
        }.items():
            text = text.replace(f"<aws.scheduler.{placeholder}>", value)
        if target["Arn"].split(":")[2] == "lambda":
            # In this thread, so that the next run of the schedule waits for its end.
            self._lambdas.run_event(target["Arn"], text.encode())
        else:
            self._router.deliver(target["Arn"], text.encode())

    def _subscription(self, context: Context, logical_id: str, properties: Properties) -> Created:
        topic, endpoint = properties["TopicArn"], properties["Endpoint"]
        protocol = properties["Protocol"]
        if protocol == "lambda":
            self._topics.subscribe_function(topic, endpoint)
            return Created(f"{topic}:{uuid.uuid4()}")
        if protocol not in ("sqs", "email", "email-json", "sms", "https"):
            raise TemplateError(f"{logical_id}: subscriptions by {protocol} are not supported here")
        names = ("RawMessageDelivery", "FilterPolicy", "FilterPolicyScope", "RedrivePolicy")
        attributes = {key: _variable(properties[key]) for key in names if key in properties}
        answer = context.client("sns").subscribe(
            TopicArn=topic,
            Protocol=protocol,
            Endpoint=endpoint,
            Attributes=attributes,
            ReturnSubscriptionArn=True,
        )
        return Created(answer["SubscriptionArn"], {"Arn": answer["SubscriptionArn"]})


def _variable(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Write a value as CloudFormation does where text is wanted."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    return str(value)
