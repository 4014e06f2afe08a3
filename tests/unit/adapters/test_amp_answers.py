"""Whatever AMP, or something before it, answers: a result, and never an exception."""

import json
from typing import Any

import requests
from hypothesis import given
from hypothesis import strategies as st

from nodemend.adapters.amp import _document_of, _group, _result_of
from nodemend.domain.policy import ClusterPolicy

CLUSTER = ClusterPolicy("gpu-prod", "ws-1", "eu-west-1")

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=12,
)
LABELS = st.dictionaries(st.sampled_from(["gpu", "Hostname", "metric"]), st.text(max_size=6) | JSON)
ELEMENTS = st.fixed_dictionaries(
    {}, optional={"metric": LABELS | JSON, "value": st.lists(JSON, max_size=3) | JSON}
)
DATA = st.fixed_dictionaries(
    {},
    optional={
        "resultType": st.sampled_from(["vector", "scalar", "matrix", "string"]) | JSON,
        "result": st.lists(ELEMENTS, max_size=3) | JSON,
        "stats": st.fixed_dictionaries({}, optional={"samples": JSON}) | JSON,
    },
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from(["success", "error"]) | JSON,
        "data": DATA | JSON,
        "warnings": st.lists(st.text(max_size=8), max_size=2) | JSON,
        "error": JSON,
        "errorType": JSON,
    },
)


def response(status: int, body: bytes) -> requests.Response:
    answer = requests.Response()
    answer.status_code = status
    answer._content = body
    return answer


@given(st.sampled_from([200, 400, 403, 422, 429, 503, 504]), BODIES | JSON, st.integers(0, 5))
def test_any_document_is_an_answer_or_an_unknown(status: int, body: Any, warn: int) -> None:
    text = json.dumps(body).encode()

    result = _result_of(CLUSTER, response(status, text), warn)

    assert result.problem is not None or status == 200
    for sample in result.samples:
        assert all(isinstance(value, str) for value in sample.labels.values())


@given(st.sampled_from([200, 403, 500]), st.binary(max_size=40))
def test_any_bytes_are_an_unknown(status: int, body: bytes) -> None:
    answer = response(status, body)

    assert isinstance(_document_of(answer), dict)
    result = _result_of(CLUSTER, answer, None)
    assert result.problem is not None
    assert len(result.problem.text) < 800


@given(st.fixed_dictionaries({}, optional={"name": JSON, "interval": JSON, "rules": JSON}))
def test_any_rule_group_is_read_or_refused_as_malformed(group: dict[str, Any]) -> None:
    try:
        _group(group)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return
