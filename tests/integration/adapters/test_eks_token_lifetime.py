"""Tokens over time: the real token maker and client before an API that checks them as EKS does."""

from collections.abc import Iterator
from dataclasses import dataclass

import boto3
import pytest

from local.identity import Identities
from local.kubernetes import KubernetesEmulator, Rbac, Rule, User
from local.sigv4 import SignatureError, verify_eks_token
from nodemend.adapters.eks_auth import EksAccess
from nodemend.adapters.kubernetes_cluster import KubernetesClusters
from nodemend.application.ports import Cluster, ClusterAccess, ClusterEndpoint
from nodemend.domain.errors import ClusterForbiddenError, ClusterUnauthorizedError
from nodemend.domain.policy import ClusterPolicy
from tests.fakes.system import ManualClock

POLICY = ClusterPolicy("gpu-prod", "ws-1", "eu-west-1")
NODE = "ip-10-0-1-5.ec2.internal"


class KnownEndpoint(EksAccess):
    """Tokens as EKS wants them, for an endpoint that no EKS API knows."""

    where: ClusterEndpoint

    def endpoint(self, cluster: ClusterPolicy, *, is_fresh: bool = False) -> ClusterEndpoint:
        return self.where


@dataclass
class Scene:
    cluster: Cluster
    emulator: KubernetesEmulator
    identities: Identities
    adapter_clock: ManualClock
    server_clock: ManualClock

    def pass_time(self, seconds: float) -> None:
        self.adapter_clock.advance(seconds)
        self.server_clock.advance(seconds)

    def statuses(self) -> list[int]:
        return [call.status for call in self.emulator.calls.calls()]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    adapter_clock, server_clock, identities = ManualClock(), ManualClock(), Identities()
    # The date in a signature is the machine's time: the server's, here.
    monkeypatch.setattr("botocore.auth.get_current_datetime", server_clock.now)
    key = identities.issue("drain_node")
    session = boto3.Session(key.access_key_id, key.secret_access_key, key.session_token)

    def authenticate(token: str | None) -> User | None:
        try:
            caller = verify_eks_token(
                token or "", POLICY.name, identities, clock=lambda: server_clock.now().timestamp()
            )
        except SignatureError:
            return None
        return User(caller, ("nodemend",))

    emulator = KubernetesEmulator(
        POLICY.name,
        authenticate,
        Rbac.of_users({"drain_node": [Rule(("get", "list"), ("nodes",))]}),
        background=False,
    )
    with emulator:
        emulator.add_node(NODE, instance_id="i-0aaaaaaaaaaaaaaa1")
        access = KnownEndpoint(session_for=lambda _: session, clock=adapter_clock)
        access.where = ClusterEndpoint(emulator.url, emulator.ca_pem)
        shaped: ClusterAccess = access
        port: ClusterAccess = shaped
        assert port.token(POLICY).startswith("k8s-aws-v1.")
        clusters = KubernetesClusters(access=shaped, clock=adapter_clock)
        yield Scene(clusters.open(POLICY), emulator, identities, adapter_clock, server_clock)


@pytest.mark.case("R21")
def test_warm_container_outlives_its_tokens_without_a_single_401(scene):
    for _ in range(5):
        assert scene.cluster.get_node(NODE) is not None
        scene.pass_time(16 * 60)
    assert scene.statuses() == [200] * 5


@pytest.mark.case("R21")
def test_token_that_is_too_old_for_the_server_is_refreshed_once(scene):
    assert scene.cluster.get_node(NODE) is not None
    scene.server_clock.advance(16 * 60)  # our own clock has stood still meanwhile
    assert scene.cluster.get_node(NODE) is not None
    assert scene.cluster.get_node(NODE) is not None
    assert scene.statuses() == [200, 401, 200, 200]


@pytest.mark.case("R21")
@pytest.mark.case("R24")
def test_revoked_identity_ends_after_one_refresh_and_touches_nothing(scene):
    key = next(iter(scene.identities._by_key))
    scene.identities.revoke(key)
    with pytest.raises(ClusterUnauthorizedError):
        scene.cluster.patch_node(
            NODE, [{"op": "add", "path": "/spec/unschedulable", "value": True}]
        )
    assert scene.statuses() == [401, 401]
    assert scene.emulator.calls.mutations() == []


@pytest.mark.case("R24")
def test_missing_right_is_told_apart_from_a_missing_identity(scene):
    with pytest.raises(ClusterForbiddenError, match="patch nodes"):
        scene.cluster.patch_node(
            NODE, [{"op": "add", "path": "/spec/unschedulable", "value": True}]
        )
    assert scene.statuses() == [403]
