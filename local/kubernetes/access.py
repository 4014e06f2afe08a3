"""Who calls, and what they may do: authentication and authorisation are injected.

Rules read as RBAC's do: a subresource is a resource of its own (`pods/eviction`), a rule names
verbs, API groups and resources, and `*` stands for all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final


@dataclass(frozen=True)
class User:
    """An authenticated caller. `name` is also what the call log shows as the caller."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""


Authenticator = Callable[[str | None], User | None]
"""Maps a bearer token to its user. None for a token that is not valid; a call without a token
(None) that yields no user counts as anonymous."""

ANONYMOUS: Final = User("system:anonymous", ("system:unauthenticated",))
ADMIN_GROUP: Final = "system:masters"
"""Members may do everything."""


class StaticTokens:
    """An authenticator over a fixed table of tokens."""

    def __init__(self, users: Mapping[str, User]) -> None:
        self._users = dict(users)

    def __call__(self, token: str | None) -> User | None:
        """Return the user of the token."""
        return None if token is None else self._users.get(token)


@dataclass(frozen=True)
class Rule:
    """One rule of a role."""

    verbs: tuple[str, ...]
    resources: tuple[str, ...]
    """`nodes`, `pods/eviction`, `*`."""
    groups: tuple[str, ...] = ("",)
    names: tuple[str, ...] = ()
    """Restricts the rule to objects of these names; empty: any."""

    def allows(self, action: "Action") -> bool:
        """Tell whether the rule covers the action."""
        return (
            _covers(self.verbs, action.verb)
            and _covers(self.groups, action.group)
            and _covers(self.resources, action.resource)
            and (not self.names or action.name in self.names)
        )


def _covers(allowed: tuple[str, ...], wanted: str) -> bool:
    return "*" in allowed or wanted in allowed


@dataclass(frozen=True)
class Action:
    """What a request wants to do."""

    verb: str
    group: str
    resource: str
    """With the subresource: `pods/eviction`."""
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True)
class Binding:
    """Gives a role's rules to users and groups."""

    rules: tuple[Rule, ...]
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    role: str = "nodemend"
    """Name of both the ClusterRole and its binding, as access reviews tell it."""
    namespace: str | None = None
    """None: cluster-wide. Else the rules hold in this namespace only."""

    def subject(self, user: User) -> str | None:
        """Return how the binding names the user (`User "x"`, `Group "y"`), if it does."""
        if user.name in self.users:
            return f'User "{user.name}"'
        for group in user.groups:
            if group in self.groups:
                return f'Group "{group}"'
        return None


@dataclass(frozen=True)
class Decision:
    """Allowed or not, and why; a refusal has no reason, as RBAC gives none."""

    allowed: bool
    reason: str = ""


_SELF_REVIEW: Final = Binding(
    rules=(
        Rule(
            ("create",),
            ("selfsubjectaccessreviews", "selfsubjectreviews"),
            ("authorization.k8s.io", "authentication.k8s.io"),
        ),
    ),
    groups=("system:authenticated",),
    role="system:basic-user",
)
_PUBLIC_PATHS: Final = frozenset({"/healthz", "/livez", "/readyz", "/version", "/version/"})


@dataclass(frozen=True)
class Rbac:
    """All bindings of the cluster; every authenticated user may review its own access."""

    bindings: Sequence[Binding] = field(default_factory=tuple)

    @classmethod
    def of_users(cls, rules: Mapping[str, Iterable[Rule]]) -> "Rbac":
        """Build from the rules of each user name."""
        return cls([Binding(tuple(given), users=(name,)) for name, given in rules.items()])

    def decide(self, user: User, action: Action) -> Decision:
        """Tell whether `user` may do it."""
        if ADMIN_GROUP in user.groups:
            return Decision(allowed=True)
        for binding in (_SELF_REVIEW, *self.bindings):
            subject = binding.subject(with_system_groups(user))
            if subject is None or binding.namespace not in (None, action.namespace):
                continue
            if any(rule.allows(action) for rule in binding.rules):
                scope = "ClusterRoleBinding" if binding.namespace is None else "RoleBinding"
                return Decision(
                    allowed=True,
                    reason=f'RBAC: allowed by {scope} "{binding.role}" of ClusterRole '
                    f'"{binding.role}" to {subject}',
                )
        return Decision(allowed=False)

    def decide_path(self, user: User, path: str) -> Decision:
        """Tell whether `user` may read a path that is no resource."""
        if ADMIN_GROUP in user.groups:
            return Decision(allowed=True)
        if path in _PUBLIC_PATHS:
            role = "system:public-info-viewer"
            group = "system:unauthenticated" if user == ANONYMOUS else "system:authenticated"
            return Decision(
                allowed=True,
                reason=f'RBAC: allowed by ClusterRoleBinding "{role}" of ClusterRole "{role}" '
                f'to Group "{group}"',
            )
        return Decision(allowed=user != ANONYMOUS and path.startswith(("/api", "/apis")))


def with_system_groups(user: User) -> User:
    """Return the user with the group that every authenticated caller is in."""
    if user == ANONYMOUS:
        return user
    return replace(user, groups=(*user.groups, "system:authenticated"))
