"""The errors that the state machine knows by name.

A Lambda function that raises ends its Step Functions task with the class name as `Error`, so this
tree is a protocol with `statemachines/remediate_node.asl.yaml`: each class is named there, and each
name there is a class here, one of Lambda's own (`PLATFORM_ERRORS`) or the last `States.ALL`.
AMP is not in the tree: a failed query is an answer ("unknown"), not an error.

    NodemendError
    ├── RetryableError            the same call may succeed in a moment: the task is retried
    │   ├── AwsUnavailableError       an AWS API throttled, timed out or answered 5xx
    │   ├── ClusterUnavailableError   the Kubernetes API could not be reached, throttled or failed
    │   └── ConcurrentUpdateError     somebody else wrote the record first
    └── PermanentError            a retry is useless: the task's Catch decides
        ├── AwsForbiddenError         IAM denied an AWS call
        ├── ClusterForbiddenError     authenticated, but RBAC denied the call (403)
        ├── ClusterUnauthorizedError  the token is not accepted (401, after one refresh)
        ├── IllegalTransitionError    the incident cannot go from its state to that one
        ├── InvalidInputError         the input is wrong; names the field and the remedy
        ├── LeaseLostError            the incident holds no valid lease, so nothing may be changed
        ├── PolicyInvalidError        the deployed policy cannot be used
        ├── RepairRefusedError        the capacity API refused the repair for good
        └── SupersededError           the node, the incident or the execution is another one by now
"""


class NodemendError(Exception):
    """Root of all errors that nodemend raises on purpose."""


class RetryableError(NodemendError):
    """The same call may succeed in a moment."""


class AwsUnavailableError(RetryableError):
    """An AWS API throttled, timed out or answered 5xx."""


class ClusterUnavailableError(RetryableError):
    """The Kubernetes API could not be reached, throttled the call or answered 5xx.

    Only network and server trouble: 401 and 403 have classes of their own, because their remedies
    differ (access entry, RBAC).
    """


class ConcurrentUpdateError(RetryableError):
    """A versioned write lost: the record changed since it was read. Read again and decide again."""


class PermanentError(NodemendError):
    """A retry is useless."""


class AwsForbiddenError(PermanentError):
    """IAM denied an AWS call; the message names the action."""


class ClusterForbiddenError(PermanentError):
    """The Kubernetes API knows the caller, but RBAC denies the call (403)."""


class ClusterUnauthorizedError(PermanentError):
    """The Kubernetes API does not accept the token (401), even after one refresh."""


class IllegalTransitionError(PermanentError):
    """The incident's state has no such successor."""


class InvalidInputError(PermanentError):
    """The input is wrong.

    Example:
        >>> str(InvalidInputError("node", "is missing", "name it exactly as Kubernetes does"))
        'node: is missing. Remedy: name it exactly as Kubernetes does.'
    """

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{field}: {problem}. Remedy: {remedy}.")


class LeaseLostError(PermanentError):
    """The guard does not hold a valid lease for this incident, so nothing may be changed."""


class PolicyInvalidError(PermanentError):
    """The deployed policy cannot be read or is invalid."""


class RepairRefusedError(PermanentError):
    """The capacity API refused the repair and will refuse it again."""


class SupersededError(PermanentError):
    """The node is another machine by now, or the incident is closed or another execution's."""


def error_of(name: str, message: str) -> PermanentError:
    """Return an error of the class of that name, to end an execution by its real cause.

    Example:
        >>> error_of("ClusterForbiddenError", "denied")
        ClusterForbiddenError('denied')
    """
    known = {cls.__name__: cls for cls in PermanentError.__subclasses__()}
    cls = known.get(name)
    if cls is None or issubclass(cls, InvalidInputError):
        return PermanentError(f"{name}: {message}")
    return cls(message)


PLATFORM_ERRORS = (
    "Lambda.ServiceException",
    "Lambda.AWSLambdaException",
    "Lambda.SdkClientException",
    "Lambda.ClientExecutionTimeoutException",
    "Lambda.TooManyRequestsException",
    "Lambda.Unknown",
    "Runtime.ExitError",
    "Sandbox.Timedout",
    "States.Timeout",
)
"""Errors of Lambda and Step Functions themselves that a task retries (`Runtime.ExitError`: the
process died between two lines, which every step survives); the two time-outs once, as
the same work mostly takes as long again."""

TIMEOUT_ERRORS = ("Sandbox.Timedout", "States.Timeout")
