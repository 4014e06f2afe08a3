"""A Kubernetes cluster at HTTP level: enough of one for a real client to cordon, drain and repair.

Who sets up a scene needs `KubernetesEmulator` and what it takes; `resources` names the types.
"""

from local.kubernetes.access import (
    ADMIN_GROUP,
    Authenticator,
    Binding,
    Rbac,
    Rule,
    StaticTokens,
    User,
)
from local.kubernetes.emulator import KubernetesEmulator
from local.kubernetes.timings import Timings

__all__ = [
    "ADMIN_GROUP",
    "Authenticator",
    "Binding",
    "KubernetesEmulator",
    "Rbac",
    "Rule",
    "StaticTokens",
    "Timings",
    "User",
]
