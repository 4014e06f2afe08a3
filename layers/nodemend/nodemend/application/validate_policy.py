"""Check a policy before AppConfig deploys it, with the parser that the functions use."""

from collections.abc import Callable

from nodemend.contracts.validation import ValidatePolicyRequest
from nodemend.domain.policy import Policy


def validate_policy(
    request: ValidatePolicyRequest, *, parse: Callable[[object, str], Policy]
) -> Policy:
    """Return the policy as it would be in force.

    Raises:
        PolicyInvalidError: naming each wrong field and what would be right.
    """
    return parse(request.document(), request.version)
