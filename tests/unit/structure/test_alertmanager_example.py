"""The shipped alert manager definition has the structure that AMP and nodemend need."""

import re

import pytest
import yaml

from tests.unit.structure.repository import ROOT, template

DEFINITION = yaml.safe_load((ROOT / "docs/alertmanager.example.yaml").read_text())
CONFIG = yaml.safe_load(DEFINITION["alertmanager_config"])
(SNS,) = next(one for one in CONFIG["receivers"] if one["name"] == "nodemend")["sns_configs"]


@pytest.mark.case("D37")
def test_d37_the_message_is_the_template_and_the_attributes_are_a_map():
    (name,) = re.fullmatch(r'\{\{ template "([\w.]+)" \. \}\}', SNS["message"]).groups()
    assert f'{{{{ define "{name}" }}}}' in DEFINITION["template_files"]["nodemend"]
    assert isinstance(SNS["attributes"], dict)
    assert {"cluster", "alertname"} == set(SNS["attributes"])
    assert all(isinstance(value, str) for value in SNS["attributes"].values())


@pytest.mark.case("D35")
def test_d35_the_subject_is_short_plain_and_no_template():
    assert SNS["subject"].isascii()
    assert len(SNS["subject"]) < 100
    assert "{{" not in SNS["subject"]
    assert "\n" not in SNS["subject"]


@pytest.mark.case("D38")
def test_d38_every_value_of_the_template_is_quoted():
    text = DEFINITION["template_files"]["nodemend"]
    printed = re.findall(r"\{\{ (?!define|end|range|if|template)([^}]*)\}\}", text)
    assert printed
    assert all('printf "%q"' in action for action in printed)


def test_the_definition_has_what_amp_demands_and_nothing_that_it_refuses():
    assert set(DEFINITION) == {"template_files", "alertmanager_config"}
    assert SNS["sigv4"]["region"] == SNS["topic_arn"].split(":")[3]
    assert not {"api_url", "http_config"} & set(SNS)
    assert not SNS["topic_arn"].endswith(".fifo")
    names = {receiver["name"] for receiver in CONFIG["receivers"]}
    routes = [CONFIG["route"], *CONFIG["route"]["routes"]]
    assert {route["receiver"] for route in routes} <= names


@pytest.mark.case("D41")
def test_d41_a_group_is_a_node():
    (route,) = CONFIG["route"]["routes"]
    assert "Hostname" in route["group_by"]


def test_amp_may_publish_only_for_this_account_and_only_to_a_standard_topic():
    resources = template()["Resources"]
    assert "FifoTopic" not in resources["AlertTopic"]["Properties"]
    (statement,) = resources["AlertTopicPolicy"]["Properties"]["PolicyDocument"]["Statement"]
    assert statement["Principal"] == {"Service": "aps.amazonaws.com"}
    assert statement["Condition"]["StringEquals"]["aws:SourceAccount"] == {"Ref": "AWS::AccountId"}
    subscription = resources["AlertSubscription"]["Properties"]
    assert subscription["RawMessageDelivery"] is False
    queue = resources["AlertQueue"]["Properties"]
    assert queue["RedrivePolicy"]["deadLetterTargetArn"] == {"GetAtt": "AlertDeadLetters.Arn"}
    assert "AlertTopicArn" in template()["Outputs"]
