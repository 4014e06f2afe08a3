"""Who is calling: the credentials that the laptop pipeline hands out, and whose each is.

The real services know a caller by the principal behind the access key. The emulators do the
same: each Lambda function (and each person or controller of a scenario) gets an access key of its
own, and every emulator that checks a signature asks this registry whose key it is. So a scenario
can say "fail the reads of drain_node" and the record of calls can name the function.
"""

import secrets
import string
import threading
from dataclasses import dataclass, field

_KEY_ALPHABET = string.ascii_uppercase + "234567"
"""Characters of an access key id after its four-letter prefix (base 32)."""


@dataclass(frozen=True, slots=True)
class Credential:
    """One access key and the caller behind it.

    Secrets stay out of `repr`, so that a failed assertion or a log line does not show them.
    """

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(repr=False)
    """Temporary credentials (a Lambda function's, or AssumeRole's) have one; a request signed
    with the key is refused unless it carries exactly this token."""
    caller: str
    """As `ApiCall.caller` names it: the function's short name, `person`, `kubelet`…"""

    def environment(self) -> dict[str, str]:
        """Return the variables under which AWS SDKs look for credentials."""
        variables = {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
        }
        if self.session_token is not None:
            variables["AWS_SESSION_TOKEN"] = self.session_token
        return variables


class Identities:
    """All credentials in force; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[str, Credential] = {}

    def issue(self, caller: str, *, temporary: bool = True) -> Credential:
        """Make and register a credential for a caller.

        Args:
            caller: Whom the key stands for. One caller may hold several keys.
            temporary: With a session token and an `ASIA` key, as Lambda and STS give them; else
                a long-lived `AKIA` key without one.
        """
        prefix = "ASIA" if temporary else "AKIA"
        credential = Credential(
            access_key_id=prefix + "".join(secrets.choice(_KEY_ALPHABET) for _ in range(16)),
            secret_access_key=secrets.token_urlsafe(30),
            session_token=secrets.token_urlsafe(120) if temporary else None,
            caller=caller,
        )
        self.register(credential)
        return credential

    def register(self, credential: Credential) -> None:
        """Make a credential from elsewhere known, such as one that an STS emulator gave out.

        A key that is known already is replaced: STS emulators may repeat themselves.
        """
        with self._lock:
            self._by_key[credential.access_key_id] = credential

    def revoke(self, access_key_id: str) -> None:
        """Forget a key, so that its next signature is refused; unknown keys are ignored."""
        with self._lock:
            self._by_key.pop(access_key_id, None)

    def lookup(self, access_key_id: str) -> Credential | None:
        """Return the credential of an access key, or None if nobody holds it."""
        with self._lock:
            return self._by_key.get(access_key_id)

    def caller_of(self, access_key_id: str) -> str:
        """Return whose key it is, or `unknown`, as `ApiCall.caller` writes it."""
        credential = self.lookup(access_key_id)
        return "unknown" if credential is None else credential.caller
