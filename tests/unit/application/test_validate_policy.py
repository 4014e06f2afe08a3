"""A policy is checked by the same parser before it is deployed as when it is in force."""

import base64
import json

import pytest

from nodemend.application.validate_policy import validate_policy
from nodemend.contracts.policy import parse_policy
from nodemend.contracts.validation import ValidatePolicyRequest
from nodemend.domain.errors import PolicyInvalidError
from nodemend.domain.faults import Mode


def request(text: str) -> ValidatePolicyRequest:
    content = base64.b64encode(text.encode()).decode()
    return ValidatePolicyRequest.model_validate({"content": content, "configurationVersion": "4"})


@pytest.mark.parametrize("as_json", [True, False])
def test_a_valid_policy_is_returned_as_it_would_be_in_force(as_json: bool) -> None:
    document = {"schema_version": 1, "mode": "enforce"}
    text = json.dumps(document) if as_json else "schema_version: 1\nmode: enforce\n"

    policy = validate_policy(request(text), parse=parse_policy)

    assert (policy.version, policy.mode) == ("4", Mode.ENFORCE)


@pytest.mark.parametrize("text", ["mode: enforce", "schema_version: 1\nmod: enforce", "", "- 1"])
def test_an_invalid_policy_is_refused(text: str) -> None:
    with pytest.raises(PolicyInvalidError):
        validate_policy(request(text), parse=parse_policy)
