"""Embedded metrics in a function's output."""

import json

import pytest

from local.aws.emf import parse_emf


def line(**fields: object) -> str:
    header = {
        "Timestamp": 1_700_000_000_500,
        "CloudWatchMetrics": [
            {
                "Namespace": "nodemend",
                "Dimensions": [["cluster"], ["cluster", "outcome"]],
                "Metrics": [{"Name": "Closed", "Unit": "Count"}, {"Name": "Age"}],
            }
        ],
    }
    return json.dumps({"_aws": header, "cluster": "blue", "outcome": "REPLACED", **fields})


def test_each_dimension_set_is_a_series():
    samples = list(parse_emf(line(Closed=1), "close_incident"))

    assert [sample.dimensions for sample in samples] == [
        {"cluster": "blue"},
        {"cluster": "blue", "outcome": "REPLACED"},
    ]
    assert {(s.namespace, s.name, s.value, s.unit, s.function, s.at) for s in samples} == {
        ("nodemend", "Closed", 1.0, "Count", "close_incident", 1_700_000_000.5)
    }


def test_a_list_of_values_is_one_sample_each():
    values = [sample.value for sample in parse_emf(line(Age=[1, 2.5]), "f")]

    assert values == [1.0, 2.5, 1.0, 2.5]


@pytest.mark.parametrize(
    "text",
    [
        "plain text",
        '{"level": "INFO"}',
        '{"_aws": ',
        '{"_aws": 1}',
        '["_aws"]',
        line(),
        line(Age="x"),
    ],
)
def test_what_is_no_metric_yields_nothing(text):
    assert list(parse_emf(text, "f")) == []
