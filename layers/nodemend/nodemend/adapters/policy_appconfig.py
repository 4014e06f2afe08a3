"""The policy in force, from AWS AppConfig, at most 30 seconds old.

Powertools' provider caches and polls. Two traps are handled here. AppConfig's tokens are good for
one call, so after one lost answer (the SDK's own repetition included) a provider's token is spent
and it never recovers: it is rebuilt once, which starts a new session. And the provider turns every
error into one class; the real one is its context.
"""

import hashlib
import io
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import yaml
from aws_lambda_powertools.utilities.parameters import AppConfigProvider
from aws_lambda_powertools.utilities.parameters.exceptions import GetParameterError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from nodemend.adapters._aws import error_code, translated
from nodemend.application.ports import Clock
from nodemend.domain.errors import (
    AwsForbiddenError,
    AwsUnavailableError,
    NodemendError,
    PolicyInvalidError,
)
from nodemend.domain.policy import ClusterPolicy, Policy

if TYPE_CHECKING:
    from mypy_boto3_appconfigdata.client import AppConfigDataClient

_logger = logging.getLogger(__name__)

MAX_AGE_S = 30


class AppConfigPolicies:
    """The policy as one AppConfig profile deploys it.

    Args:
        application: Id or name of the AppConfig application.
        environment: Id or name of its environment.
        profile: Id or name of its configuration profile.
        client: The `appconfigdata` client.
        parse: Turns the YAML document and its version into a policy; raises PolicyInvalidError.
        clock: Ages the answer "none is deployed", which the provider does not cache.
        default_cluster: The deployment's own cluster, for a policy that names none.
    """

    def __init__(
        self,
        *,
        application: str,
        environment: str,
        profile: str,
        client: "AppConfigDataClient",
        parse: Callable[[object, str], Policy],
        clock: Clock,
        default_cluster: ClusterPolicy | None = None,
    ) -> None:
        self._application = application
        self._environment = environment
        self._profile = profile
        self._session = _Session(client)
        self._parse = parse
        self._clock = clock
        self._default_cluster = default_cluster
        self._provider: AppConfigProvider | None = None
        self._parsed: tuple[bytes, Policy] | None = None
        self._none_until: datetime | None = None
        self._was_deployed = False

    def current(self) -> Policy:
        """Return the policy in force; the built-in dry run if none was ever deployed.

        Raises:
            PolicyInvalidError: if one is deployed and is invalid or gone.
            AwsUnavailableError, AwsForbiddenError: if AppConfig could not be asked: it is not the
                built-in policy that holds then.
        """
        if self._none_until is None or self._clock.now() >= self._none_until:
            content = self._content()
            if content is not None:
                return self._policy(content).with_default_cluster(self._default_cluster)
            self._none_until = self._clock.now() + timedelta(seconds=MAX_AGE_S)
        return Policy().with_default_cluster(self._default_cluster)

    def _content(self) -> bytes | None:
        """Return the deployed document; None if none was ever deployed."""
        try:
            content = self._poll()
        except GetParameterError as error:
            if _is_not_found(error):
                self._accept_none(error)
                return None
            _logger.warning("the policy's session is started again: %s", _cause(error))
            self._provider = None
            try:
                content = self._poll()
            except GetParameterError as second:
                if self._is_nothing_deployed(second):
                    self._accept_none(second)
                    return None
                raise _unreadable(second) from second
        self._was_deployed = True
        self._none_until = None
        return content

    def _poll(self) -> bytes:
        if self._provider is None:
            self._provider = AppConfigProvider(
                environment=self._environment,
                application=self._application,
                boto3_client=cast("AppConfigDataClient", self._session),
            )
        return cast("bytes", self._provider.get(self._profile, max_age=MAX_AGE_S))

    def _accept_none(self, error: GetParameterError) -> None:
        """Accept that none is deployed, unless this container has seen one.

        Raises:
            PolicyInvalidError: if it has.
        """
        self._provider = None
        if self._was_deployed:
            raise PolicyInvalidError(f"the policy is gone: {_cause(error)}") from error
        _logger.info("no policy is deployed: %s", _cause(error))

    def _is_nothing_deployed(self, error: GetParameterError) -> bool:
        """Tell whether a session that has just been started says that nothing is deployed.

        AppConfig's model leaves three forms of it: the resource is not found, the first token is
        refused as a bad request, or the answer is empty (the provider then misses its last value
        and fails with a KeyError; a session's first answer cannot mean "unchanged"). A bad request
        that finds fault with the token itself is none of them: that answer was lost again.
        """
        cause = _cause(error)
        if not isinstance(cause, ClientError):
            return isinstance(cause, KeyError) and cause.args == (self._profile,)
        if error_code(cause) == "BadRequestException":
            return (
                cause.operation_name == "GetLatestConfiguration" and "Details" not in cause.response
            )
        return _is_not_found(error)

    def _policy(self, content: bytes) -> Policy:
        if self._parsed is None or self._parsed[0] != content:
            version = self._session.version_label or hashlib.sha256(content).hexdigest()[:12]
            try:
                document = yaml.safe_load(content)
            except (yaml.YAMLError, ValueError, RecursionError) as error:
                raise PolicyInvalidError(f"policy {version} is no YAML: {error}") from error
            self._parsed = (content, self._parse(document, version))
        return self._parsed[1]


class _Session:
    """The two calls of the client that the provider makes, with the version label kept.

    The provider throws the label away. It also adds itself to the user agent of a real client each
    time that it is built; with this in between, a rebuilt one leaves no trace.
    """

    def __init__(self, client: "AppConfigDataClient") -> None:
        self._client = client
        self.version_label = ""

    def start_configuration_session(self, **request: str) -> Any:  # noqa: ANN401 - the SDK's dict
        return self._client.start_configuration_session(**request)  # type: ignore[arg-type]

    def get_latest_configuration(self, **request: str) -> dict[str, Any]:
        answer = self._client.get_latest_configuration(**request)
        content = answer["Configuration"].read()
        if content:
            self.version_label = answer.get("VersionLabel", "")
        return {**answer, "Configuration": io.BytesIO(content)}


def _unreadable(error: GetParameterError) -> NodemendError:
    """Tell trouble on the way, which passes, from a policy that cannot be used."""
    cause = _cause(error)
    action = "appconfig:GetLatestConfiguration"
    if isinstance(cause, ClientError):
        known = translated(action, cause)
        if isinstance(known, AwsUnavailableError | AwsForbiddenError):
            return known
        if error_code(cause) == "BadRequestException" and "Details" in cause.response:
            # The token was spent on an answer that never came.
            return AwsUnavailableError(f"{action}: answers get lost: {cause}")
    if isinstance(cause, NoCredentialsError | PartialCredentialsError):
        return AwsForbiddenError(f"{action}: {cause}")
    if isinstance(cause, BotoCoreError):
        return AwsUnavailableError(f"{action}: {cause}")
    return PolicyInvalidError(f"the policy is unreadable: {cause}")


def _cause(error: GetParameterError) -> BaseException:
    return error.__cause__ or error.__context__ or error


def _is_not_found(error: GetParameterError) -> bool:
    cause = _cause(error)
    return isinstance(cause, ClientError) and error_code(cause) == "ResourceNotFoundException"
