"""Write rules.template.yaml, a stack of AMP rule groups, or with --check see if it is stale.

Recording rules are always deployed; alerting rules, one for each rule of the catalogue that is
about a node, only if the stack's parameter says so: the scans need none of them.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from nodemend.catalogue import load_catalogue
from nodemend.domain.faults import Family
from nodemend.domain.rules import Catalogue, Rule, render_query, render_template

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "rules.template.yaml"

MAX_BYTES = 1024 * 1024
MIN_INTERVAL_S = 30
MAX_RULES_IN_GROUP = 20
"""Quotas of AMP: size of one rule groups file, shortest interval, rules in a group."""

INTERVAL_S = {Family.ECC: 60, Family.THERMAL: 120, Family.UTILIZATION: 300}
"""How often alerting rules are evaluated: as often as the scans of their family."""

HEAD = """\
# Generated from layers/nodemend/nodemend/catalogue by `make schemas`. Do not edit.
AWSTemplateFormatVersion: "2010-09-09"
Description: >-
  nodemend: rule groups for one workspace of Amazon Managed Service for Prometheus. Recording rules
  for the rules that look back far or compare the GPUs of a job, and for the people who run jobs.
  Deploy it once per workspace, in the workspace's account and region.

Parameters:
  WorkspaceArn:
    Type: String
    Description: The workspace's ARN.
    AllowedPattern: ^arn:aws[a-z-]*:aps:[a-z0-9-]+:\\d{12}:workspace/ws-[0-9a-z-]+$
  NamespaceName:
    Type: String
    Default: nodemend
    Description: Name of the rule groups namespace; that of the alerting rules gets "-alerts" added.
    AllowedPattern: ^[0-9A-Za-z][-.0-9A-Z_a-z]{0,50}$
  ClusterLabel:
    Type: String
    Default: cluster
    Description: >-
      The label that tells the clusters of the workspace apart, as in the policy's matcher. Recorded
      series keep it. In a workspace of one cluster it does no harm.
    AllowedPattern: ^[A-Za-z_][0-9A-Za-z_]*$
  AlertingRules:
    Type: String
    Default: "false"
    AllowedValues: ["true", "false"]
    Description: >-
      Deploy an alerting rule for each detection rule as well. nodemend's scans need none: this is
      for those who want the same conditions in their alert manager. Each costs as much as the
      scan's query.

Conditions:
  HasAlertingRules: !Equals [!Ref AlertingRules, "true"]

Resources:
"""
RESOURCE = """\
  {name}:
    Type: AWS::APS::RuleGroupsNamespace
{condition}    Properties:
      Workspace: !Ref WorkspaceArn
      Name: !Sub "${{NamespaceName}}{suffix}"
      Data: !Sub |
"""


def recording_groups(catalogue: Catalogue, cluster_label: str = "cluster") -> dict[str, Any]:
    """Return the recording rules as Prometheus reads them."""
    words = {"cluster": cluster_label}
    return {
        "groups": [
            {
                "name": group.name,
                "interval": f"{group.interval_s}s",
                "rules": [
                    {
                        "record": one.record,
                        "expr": render_template(
                            one.promql, one.record, catalogue.metric_names, words=words
                        ),
                    }
                    for one in group.recordings
                ],
            }
            for group in catalogue.recordings
        ]
    }


def alerting_groups(catalogue: Catalogue, cluster_label: str = "cluster") -> dict[str, Any]:
    """Return an alerting rule for each rule that is about a node, as Prometheus reads them."""
    groups = []
    about_nodes = [rule for rule in catalogue.rules if is_for_alerts(rule)]
    for family in Family:
        rules = [rule for rule in about_nodes if rule.family is family]
        for number, part in enumerate(parts(rules), start=1):
            groups.append(
                {
                    "name": f"nodemend-{family}-{number}",
                    "interval": f"{INTERVAL_S[family]}s",
                    "rules": [alert(rule, catalogue, cluster_label) for rule in part],
                }
            )
    return {"groups": groups}


def is_for_alerts(rule: Rule) -> bool:
    """Tell whether the rule can find a node suspicious; the rest is about jobs and exporters."""
    return rule.is_verdict_by_xid or rule.verdict.severity <= 2


def parts(rules: Sequence[Rule]) -> Iterator[Sequence[Rule]]:
    """Yield the rules in groups that AMP takes."""
    for start in range(0, len(rules), MAX_RULES_IN_GROUP):
        yield rules[start : start + MAX_RULES_IN_GROUP]


def alert(rule: Rule, catalogue: Catalogue, cluster_label: str) -> dict[str, Any]:
    """Return one alerting rule. Its labels are those that nodemend's alert queue understands."""
    name = "".join(word.capitalize() for word in rule.id.split("-"))
    severity = "by_xid" if rule.is_verdict_by_xid else str(rule.verdict)
    return {
        "alert": f"Nodemend{name}",
        "expr": render_query(rule, catalogue.metric_names, cluster_label=cluster_label),
        "labels": {
            "team": "gpu",
            "severity": severity,
            "nodemend_rule": rule.id,
            "nodemend_family": str(rule.family),
        },
        "annotations": {"summary": summary(rule)},
    }


def summary(rule: Rule) -> str:
    """Return the rule's summary with its variables as alerting rules write them."""
    text = rule.summary.replace(" ($name)", "")
    values = {
        "gpu": "{{ $labels.gpu }}{{ $labels.neuron_device_index }}",
        "code": "{{ $labels.err_code }}{{ $labels.xid }}",
        "value": "{{ $value }}",
    }
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], text)


def document(catalogue: Catalogue) -> str:
    """Return the text of rules.template.yaml."""
    label = "${ClusterLabel}"
    text = HEAD
    for name, condition, suffix, groups in (
        ("RecordingRuleGroups", "", "", recording_groups(catalogue, label)),
        (
            "AlertingRuleGroups",
            "    Condition: HasAlertingRules\n",
            "-alerts",
            alerting_groups(catalogue, label),
        ),
    ):
        text += RESOURCE.format(name=name, condition=condition, suffix=suffix)
        data = yaml.safe_dump(groups, sort_keys=False, width=10_000)
        text += "".join(f"        {line}\n" for line in data.splitlines())
    return text


def main(arguments: list[str]) -> int:
    """Write, or check with --check."""
    text = document(load_catalogue())
    if "--check" not in arguments:
        PATH.write_text(text)
        return 0
    if PATH.is_file() and PATH.read_text() == text:
        return 0
    print("rules.template.yaml: stale or missing: run make schemas", file=sys.stderr)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
