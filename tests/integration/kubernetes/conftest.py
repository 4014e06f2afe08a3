"""A server under test for each conformance module: the emulator, with a clock set by hand."""

from collections.abc import Iterator

import pytest

from local.kubernetes import (
    ADMIN_GROUP,
    Binding,
    KubernetesEmulator,
    Rbac,
    Rule,
    StaticTokens,
    Timings,
    User,
)
from local.kubernetes.resources import NODE_CLAIMS
from tests.integration.kubernetes.conformance import Server
from tests.integration.kubernetes.replay import ApiUnderTest

ROLE = Binding(
    rules=(
        Rule(("get", "list", "patch"), ("nodes",)),
        Rule(("get", "list"), ("pods",)),
        Rule(("create",), ("pods/eviction",)),
    ),
    users=("dev",),
)
USERS = {
    "admin": User("kubernetes-admin", (ADMIN_GROUP,)),
    "no-rights": User("dev"),
    "some-rights": User("dev"),
    "valid-token": User("dev-token-user", ("devs",), uid="u2"),
}


class ManualClock:
    def __init__(self) -> None:
        self.now = 1_796_000_000.0

    def __call__(self) -> float:
        return self.now


class EmulatorControls:
    """What a scene cannot do over HTTP, done with the emulator's Python interface."""

    def __init__(
        self, emulator: KubernetesEmulator, clock: ManualClock, bindings: list[Binding]
    ) -> None:
        self._emulator = emulator
        self._clock = clock
        self._bindings = bindings

    def settle(self) -> None:
        self._emulator.tick()

    def pause(self, *controllers: str) -> None:
        self._emulator.pause(*controllers)

    def resume(self, *controllers: str) -> None:
        self._emulator.resume(*controllers)
        self._emulator.tick()

    def advance(self, seconds: float) -> None:
        self._clock.now += seconds
        self._emulator.tick()

    def silence(self, node: str) -> None:
        self._emulator.set_node_silent(node)

    def install(self, plural: str) -> None:
        self._emulator.serve({"nodeclaims": NODE_CLAIMS}[plural])

    def grant(self, is_granted: bool) -> None:
        self._bindings[:] = [ROLE] if is_granted else []


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    clock = ManualClock()
    bindings: list[Binding] = []
    emulator = KubernetesEmulator(
        "recorded",
        StaticTokens(USERS),
        Rbac(bindings),
        clock=clock,
        timings=Timings(conflict_retry_s=0.02),
        background=False,
    )
    tokens = {name: name for name in USERS} | {"bad-token": "nobody-knows-this"}
    with emulator:
        api = ApiUnderTest(emulator.url, emulator.ca_pem, tokens)
        yield Server(api, EmulatorControls(emulator, clock, bindings))
        api.close()
