"""Names that records of calls use for functions."""

import pytest

from local.aws.wiring import short_name


@pytest.mark.parametrize(
    ("logical_id", "function_name", "expected"),
    [
        ("DrainNodeFunction", "", "drain_node"),
        ("DrainNode", "", "drain_node"),
        ("ScanEcc", "prod-scan-ecc", "scan_ecc"),
        ("Anything", "shared-name", "shared_name"),
        ("Function", "", "function"),
    ],
)
def test_short_names(logical_id, function_name, expected):
    assert short_name(logical_id, function_name, "prod") == expected
