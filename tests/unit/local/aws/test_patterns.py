"""Event patterns, case by case, after EventBridge's documentation of its matchers."""

import pytest

from local.aws.patterns import PatternError, matches

EVENT = {
    "source": "aws.states",
    "detail-type": "Status Change",
    "detail": {
        "status": "FAILED",
        "count": 5,
        "empty": None,
        "on": True,
        "ip": "10.0.0.7",
        "file": "gpu.log",
        "tags": ["a", "b"],
        "pods": [{"name": "x"}, {"name": "y", "gpu": 1}],
    },
}


@pytest.mark.parametrize(
    "detail",
    [
        {"status": ["OK", "FAILED"]},
        {"status": [{"prefix": "FAI"}]},
        {"status": [{"prefix": {"equals-ignore-case": "fai"}}]},
        {"status": [{"suffix": "LED"}]},
        {"status": [{"equals-ignore-case": "failed"}]},
        {"status": [{"wildcard": "F*D"}]},
        {"file": [{"wildcard": "*.log"}]},
        {"status": [{"anything-but": "OK"}]},
        {"status": [{"anything-but": ["OK", "RUNNING"]}]},
        {"status": [{"anything-but": {"prefix": "RUN"}}]},
        {"count": [5]},
        {"count": [{"numeric": [">", 4, "<=", 5]}]},
        {"empty": [None]},
        {"on": [True]},
        {"ip": [{"cidr": "10.0.0.0/24"}]},
        {"tags": ["b"]},
        {"pods": {"name": ["y"]}},
        {"missing": [{"exists": False}]},
        {"status": [{"exists": True}]},
        {"missing": {"deeper": [{"exists": False}]}},
        {"$or": [{"status": ["OK"]}, {"count": [5]}]},
    ],
)
def test_a_pattern_that_holds_matches(detail):
    assert matches({"source": [{"prefix": "aws."}], "detail": detail}, EVENT)


@pytest.mark.parametrize(
    "detail",
    [
        {"status": ["failed"]},
        {"status": [{"prefix": "AIL"}]},
        {"status": [{"wildcard": "*x*"}]},
        {"file": [{"wildcard": "gpu?log"}]},
        {"status": [{"anything-but": ["FAILED"]}]},
        {"status": [{"anything-but": {"suffix": ["LED", "NG"]}}]},
        {"missing": [{"anything-but": "x"}]},
        {"count": ["5"]},
        {"count": [{"numeric": [">", 5]}]},
        {"status": [{"numeric": [">", 5]}]},
        {"on": [1]},
        {"on": [{"numeric": ["=", 1]}]},
        {"missing": [None]},
        {"ip": [{"cidr": "10.1.0.0/24"}]},
        {"file": [{"cidr": "10.1.0.0/24"}]},
        {"tags": ["c"]},
        {"pods": {"name": ["x"], "gpu": [1]}},
        {"missing": [{"exists": True}]},
        {"status": [{"exists": False}]},
        {"status": {"deeper": ["x"]}},
        {"$or": [{"status": ["OK"]}, {"count": [6]}]},
        {"$or": [{"count": [5]}], "status": ["OK"]},
    ],
)
def test_a_pattern_that_does_not_hold_does_not_match(detail):
    assert not matches({"detail": detail}, EVENT)


@pytest.mark.parametrize("detail", [{"status": "FAILED"}, {"status": [{"sounds-like": "F"}]}])
def test_what_eventbridge_would_refuse_is_an_error(detail):
    with pytest.raises(PatternError):
        matches({"detail": detail}, EVENT)
