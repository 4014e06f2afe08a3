"""The composition root builds every function's ports from the environment alone, without a call."""

import inspect
import io
import json
import logging

import pytest

from nodemend import bootstrap
from nodemend.domain.errors import PolicyInvalidError
from nodemend.observability import logger
from nodemend.settings import PolicySettings

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "eu-west-1",
    "AWS_LAMBDA_FUNCTION_NAME": "nodemend-DrainNode",
    "NODEMEND_TABLE": "table",
    "NODEMEND_BUS": "bus",
    "NODEMEND_REGION": "eu-west-1",
    "NODEMEND_CLUSTER_NAME": "prod",
    "NODEMEND_WORKSPACE_ID": "ws-1",
    "NODEMEND_CLUSTER_ROLE_PREFIX": "arn:aws:iam::123456789012:role/nodemend-cluster-",
    "NODEMEND_APPCONFIG_APPLICATION": "app",
    "NODEMEND_APPCONFIG_ENVIRONMENT": "env",
    "NODEMEND_APPCONFIG_PROFILE": "policy",
    "NODEMEND_DISPATCH_QUEUE_URL": "https://sqs.eu-west-1.amazonaws.com/123456789012/dispatch",
    "NODEMEND_ALERT_DEAD_LETTERS_URL": "https://sqs.eu-west-1.amazonaws.com/123456789012/refused",
    "NODEMEND_STATE_MACHINE_ARN": "arn:aws:states:eu-west-1:123456789012:stateMachine:x",
}


class Context:
    def get_remaining_time_in_millis(self):
        return 42_000


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    cached = [
        member for _, member in inspect.getmembers(bootstrap) if hasattr(member, "cache_clear")
    ]
    for member in cached:
        member.cache_clear()
    yield
    for member in cached:
        member.cache_clear()


@pytest.mark.parametrize(
    "build",
    [
        bootstrap.scan_ports,
        bootstrap.answer_approval_ports,
        bootstrap.receive_alert_ports,
        bootstrap.open_incident_ports,
        bootstrap.dispatch_ports,
        bootstrap.close_ports,
        bootstrap.watch_ports,
        lambda: bootstrap.step_ports(Context()),
        lambda: bootstrap.verify_ports(Context()),
        lambda: bootstrap.repair_ports(Context()),
    ],
)
def test_the_ports_are_built_without_any_call(build):
    assert build() is not None


def test_the_invocation_tells_seconds():
    assert bootstrap.step_ports(Context()).invocation.remaining_s() == 42.0


def test_adapters_are_shared_within_a_container():
    first, second = bootstrap.close_ports(), bootstrap.watch_ports()
    assert first.closing.incidents is second.closing.incidents


def test_a_missing_variable_is_named(monkeypatch):
    monkeypatch.delenv("NODEMEND_TABLE")
    with pytest.raises(ValueError, match="table"):
        bootstrap.close_ports()


def test_a_deployed_policy_gets_the_deployments_roles():
    document = {
        "schema_version": 1,
        "clusters": [{"name": "prod", "workspace": "ws-1", "region": "eu-west-1"}],
    }
    policy = bootstrap.parse_deployed_policy(document, "7")
    assert policy.clusters[0].role_arn == "arn:aws:iam::123456789012:role/nodemend-cluster-prod"


def test_a_policy_that_names_an_unknown_rule_is_refused():
    with pytest.raises(PolicyInvalidError, match="no-such-rule"):
        bootstrap.parse_deployed_policy(
            {"schema_version": 1, "rules": {"no-such-rule": {"enabled": False}}}, "7"
        )


def test_a_deployment_without_a_cluster_has_no_default(monkeypatch):
    monkeypatch.setenv("NODEMEND_CLUSTER_NAME", "")
    assert PolicySettings().default_cluster() is None


def test_the_packages_loggers_print_in_the_handlers_form(monkeypatch):
    printed = io.StringIO()
    monkeypatch.setattr(logger.registered_handler, "stream", printed)
    logging.getLogger("nodemend.adapters.amp").warning("told by an adapter")
    line = json.loads(printed.getvalue())
    assert (line["message"], line["service"]) == ("told by an adapter", "nodemend")


def test_the_bound_of_what_a_query_may_cost_is_refused_at_and_warned_of_before(monkeypatch):
    monkeypatch.setenv("NODEMEND_MAX_QUERY_SAMPLES", "50000000")

    metrics = bootstrap.scan_ports().metrics

    assert (metrics._max_samples, metrics._warn_samples) == (50_000_000, 40_000_000)


def test_without_a_bound_the_workspaces_own_quota_holds(monkeypatch):
    monkeypatch.setenv("NODEMEND_MAX_QUERY_SAMPLES", "0")

    metrics = bootstrap.scan_ports().metrics

    assert (metrics._max_samples, metrics._warn_samples) == (None, None)


def test_the_question_whether_rules_see_has_a_fraction_of_the_time_that_a_scan_has():
    ports = bootstrap.scan_ports()

    assert ports.sight._budget_s < ports.metrics._budget_s / 3
    assert ports.sight._budget_s + ports.metrics._budget_s < 70
