"""template.yaml fits the code: folders, steps, layers, permissions, environment."""

import inspect

import pytest
from pydantic_settings import BaseSettings

from nodemend import settings
from tests.unit.structure.repository import (
    FUNCTIONS,
    ROOT,
    built_by,
    folder_of,
    lambda_functions,
    refs,
    resources,
    snake,
    template,
)
from tools.asl import load_machines

EVERY = pytest.mark.parametrize("name", lambda_functions())
NEEDS_OF = {
    "_clusters": {"KubernetesLayer"},
    "_cluster_role": {"ClusterPolicy"},
    "_metrics": {"MetricsPolicy"},
    "_records": {"RecordsPolicy"},
    "_policies": {"PolicyReaderPolicy"},
    "_dispatch_queue": {"DispatchPolicy"},
    "_dead_letters": {"AlertDeadLettersPolicy"},
    "_executions": {"ExecutionsPolicy"},
}
"""What a function needs of the template if bootstrap builds this for it; and only then."""

USE_CASE_OF = {"ApproveCordon": "request_approval", "ApproveRepair": "request_approval"}
"""Use cases of the states that are not named after theirs, because two states share it."""

SETTINGS = {
    name: cls
    for name, cls in inspect.getmembers(settings, inspect.isclass)
    if issubclass(cls, BaseSettings) and cls.__module__ == settings.__name__
}
PREFIX = "NODEMEND_"


def environment_of(properties) -> set[str]:
    common = template()["Globals"]["Function"]["Environment"]["Variables"]
    return set(common) | set(properties.get("Environment", {}).get("Variables", {}))


def test_every_folder_is_deployed_and_every_deployed_folder_exists():
    assert {folder_of(properties) for properties in lambda_functions().values()} == set(FUNCTIONS)


@EVERY
def test_function_is_named_after_its_folder(name):
    folder = folder_of(lambda_functions()[name])

    own = name.removesuffix("Function")
    assert snake(own) == folder or folder == "scan_gpu_health"


@pytest.mark.parametrize("machine", load_machines(ROOT / "template.yaml"), ids=lambda m: m.id)
def test_every_task_runs_the_function_of_its_name(machine):
    for state, task in machine.tasks.items():
        function = machine.function_of(task)

        assert folder_of(lambda_functions()[function]) == USE_CASE_OF.get(state, snake(state))


@EVERY
def test_function_has_the_layers_and_permissions_that_its_adapters_need_and_no_more(name):
    properties = lambda_functions()[name]
    built = built_by(folder_of(properties))
    needs = set().union(*(need for adapter, need in NEEDS_OF.items() if adapter in built))

    granted = refs(properties["Layers"]) | refs(properties.get("Policies", []))

    assert granted == needs | {"NodemendLayer"}


def test_needs_are_told_of_adapters_that_exist():
    everything = set().union(*map(built_by, FUNCTIONS))

    assert set(NEEDS_OF) <= everything


@EVERY
def test_function_is_given_the_settings_that_it_cannot_do_without(name):
    properties = lambda_functions()[name]
    built = built_by(folder_of(properties))
    needed = {
        PREFIX + field.upper()
        for settings_name, cls in SETTINGS.items()
        if settings_name in built
        for field, info in cls.model_fields.items()
        if info.is_required()
    }

    assert needed <= environment_of(properties)


@EVERY
def test_function_is_given_no_variable_that_nothing_reads(name):
    known = {PREFIX + field.upper() for cls in SETTINGS.values() for field in cls.model_fields}

    given = {v for v in environment_of(lambda_functions()[name]) if v.startswith(PREFIX)}

    assert given <= known


@EVERY
def test_queue_outlasts_the_retries_of_its_function(name):
    """Lambda advises a visibility time-out of six times the function's time-out."""
    properties = lambda_functions()[name]
    timeout_s = properties.get("Timeout", template()["Globals"]["Function"]["Timeout"])
    for event in properties.get("Events", {}).values():
        if event["Type"] == "SQS":
            queue = event["Properties"]["Queue"]["GetAtt"].removesuffix(".Arn")
            visible_s = template()["Resources"][queue]["Properties"]["VisibilityTimeout"]

            assert visible_s >= 6 * timeout_s


def test_a_batch_of_faults_fits_into_the_time_out_though_every_call_hangs():
    """A Kubernetes API that hangs costs each message its connection and its answer."""
    properties = lambda_functions()["OpenIncidentFunction"]
    (queue,) = (e for e in properties["Events"].values() if e["Type"] == "SQS")
    timeout_s = properties.get("Timeout", template()["Globals"]["Function"]["Timeout"])

    assert queue["Properties"]["BatchSize"] * 6 < timeout_s


def test_every_dead_letter_queue_has_an_alarm_on_its_first_message():
    queues = set()
    for name in template()["Resources"]:
        properties = template()["Resources"][name].get("Properties", {})
        target = properties.get("RedrivePolicy", {}).get("deadLetterTargetArn")
        targets = [target] if target else []
        targets += [
            one["DeadLetterConfig"]["Arn"]
            for one in properties.get("Targets", [])
            if "DeadLetterConfig" in one
        ]
        queues |= {one["GetAtt"].removesuffix(".Arn") for one in targets}
    watched = {
        one["Dimensions"][0]["Value"]["GetAtt"].removesuffix(".QueueName")
        for one in resources("AWS::CloudWatch::Alarm").values()
        if one["MetricName"] == "ApproximateNumberOfMessagesVisible" and one["Threshold"] == 0
    }

    assert len(queues) == 2
    assert watched == queues


@EVERY
def test_no_schedule_repeats_a_stale_run(name):
    for event in lambda_functions()[name].get("Events", {}).values():
        if event["Type"] == "ScheduleV2":
            assert event["Properties"]["RetryPolicy"] == {
                "MaximumRetryAttempts": 0,
                "MaximumEventAgeInSeconds": 60,
            }


def test_functions_may_ask_amp_for_exactly_what_its_adapter_asks():
    (policy,) = [
        properties["PolicyDocument"]["Statement"]
        for name, properties in resources("AWS::IAM::ManagedPolicy").items()
        if name == "MetricsPolicy"
    ]
    (statement,) = policy

    assert sorted(statement["Action"]) == ["aps:ListRules", "aps:QueryMetrics"]
