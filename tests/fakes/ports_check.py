"""Proves to mypy that each fake and each adapter has the shape of its port. Never run."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nodemend.adapters.dead_letters_sqs import SqsDeadLetters
    from nodemend.adapters.dispatch_queue_sqs import SqsDispatchQueue
    from nodemend.adapters.event_bus import EventBridgeBus
    from nodemend.adapters.executions_stepfunctions import StepFunctionsExecutions
    from nodemend.adapters.guard_dynamodb import DynamoGuards
    from nodemend.adapters.history_dynamodb import DynamoHistory
    from nodemend.adapters.incidents_dynamodb import DynamoIncidents
    from nodemend.adapters.instances_ec2 import Ec2Instances
    from nodemend.adapters.outbox import DynamoOutbox
    from nodemend.adapters.policy_appconfig import AppConfigPolicies
    from nodemend.adapters.scan_memory_dynamodb import DynamoScanMemory
    from nodemend.adapters.system import LambdaInvocation, SystemClock, UlidIds
    from nodemend.adapters.telemetry_emf import EmfTelemetry
    from nodemend.application import ports
    from tests.fakes import control, instances, messages, stores, system

    def _incidents(a: DynamoIncidents, b: stores.MemoryIncidents) -> list[ports.Incidents]:
        return [a, b]

    def _outbox(a: DynamoOutbox, b: stores.MemoryOutbox) -> list[ports.Outbox]:
        return [a, b]

    def _guards(a: DynamoGuards, b: stores.MemoryGuards) -> list[ports.Guards]:
        return [a, b]

    def _memory(a: DynamoScanMemory, b: stores.MemoryScanMemory) -> list[ports.ScanMemory]:
        return [a, b]

    def _history(a: DynamoHistory, b: stores.MemoryHistory) -> list[ports.History]:
        return [a, b]

    def _instances(a: Ec2Instances, b: instances.FakeInstances) -> list[ports.Instances]:
        return [a, b]

    def _bus(a: EventBridgeBus, b: messages.MemoryEventBus) -> list[ports.EventBus]:
        return [a, b]

    def _queue(a: SqsDispatchQueue, b: messages.MemoryDispatchQueue) -> list[ports.DispatchQueue]:
        return [a, b]

    def _letters(a: SqsDeadLetters, b: messages.MemoryDeadLetters) -> list[ports.DeadLetters]:
        return [a, b]

    def _telemetry(a: EmfTelemetry, b: messages.MemoryTelemetry) -> list[ports.Telemetry]:
        return [a, b]

    def _policies(a: AppConfigPolicies, b: control.MemoryPolicies) -> list[ports.Policies]:
        return [a, b]

    def _executions(
        a: StepFunctionsExecutions, b: control.MemoryExecutions
    ) -> list[ports.Executions]:
        return [a, b]

    def _clock(a: SystemClock, b: system.ManualClock) -> list[ports.Clock]:
        return [a, b]

    def _invocation(a: LambdaInvocation, b: system.FixedInvocation) -> list[ports.Invocation]:
        return [a, b]

    def _ids(a: UlidIds, b: system.SequentialIds) -> list[ports.Ids]:
        return [a, b]
