"""Everything that a rehearsal needs, started and stopped together.

The functions of template.yaml run as they are; what they see of AWS, AMP and Kubernetes is put
together here from the emulators.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from local.amp.front import AmpFront
from local.amp.stack import LocalAmp
from local.aws.autoscaling import AutoScalingFront, Ec2Front
from local.aws.stack import LocalStack
from local.calls import CallLog, FaultPlan
from local.fleet import SceneFleet, emulated_cluster
from local.identity import Identities
from local.kubernetes import User
from local.rbac import load_rbac
from local.scenario import REGION, ScenarioDocument
from local.sigv4 import SignatureError, verify_eks_token

ROOT = Path(__file__).resolve().parent.parent
NODEMEND_GROUP = "nodemend"
"""The Kubernetes group of cluster-access.yaml's access entry."""


class World:
    """The emulated world of one scenario; a context manager.

    Args:
        scenario: The scenario.
        announce: Gets a line of text when something happens to a machine.
        keep_logs: Folder that receives the functions' logs; None: they go with the run.
    """

    def __init__(
        self,
        scenario: ScenarioDocument,
        *,
        announce: Callable[[str], None],
        keep_logs: Path | None = None,
    ) -> None:
        self._scenario = scenario
        self._run_dir = keep_logs or Path(tempfile.mkdtemp(prefix="nodemend-"))
        self._is_temporary = keep_logs is None
        self._exits = contextlib.ExitStack()
        self.calls = CallLog()
        self.faults = FaultPlan()
        self.identities = Identities()
        cluster = scenario.cluster
        self.fleet = SceneFleet(
            cluster,
            kubernetes=emulated_cluster(
                cluster.name,
                self._authenticate,
                load_rbac(ROOT / "docs" / "kubernetes" / "rbac.yaml"),
                calls=self.calls,
                faults=self.faults,
            ),
            region=REGION,
            announce=announce,
        )
        self.amp = LocalAmp(
            {cluster.workspace: [self.fleet.exporters]},
            identities=self.identities,
            calls=self.calls,
            faults=self.faults,
            region=REGION,
        )
        self.stack = LocalStack(
            ROOT / "template.yaml",
            {"ClusterName": cluster.name, "WorkspaceId": cluster.workspace},
            run_dir=self._run_dir,
            region=REGION,
            identities=self.identities,
            log=self.calls,
            faults=self.faults,
        )
        self._mount_capacity_and_metrics()

    def _authenticate(self, token: str | None) -> User | None:
        if token is None:
            return None
        try:
            caller = verify_eks_token(token, self._scenario.cluster.name, self.identities)
        except SignatureError:
            return None
        return User(caller, groups=(NODEMEND_GROUP,))

    def _mount_capacity_and_metrics(self) -> None:
        front = self.stack.front
        groups = AutoScalingFront(self.fleet.capacity)
        instances = Ec2Front(self.fleet.capacity)
        front.mount(
            lambda request: request.service == "autoscaling",
            groups,
            describe=groups.describe_call,
        )
        front.mount(
            lambda request: request.service == "ec2" and request.action in instances.handlers,
            instances,
            describe=instances.describe_call,
        )
        # AMP reports its calls and asks for faults itself.
        front.mount(lambda request: AmpFront.handles(request.path), self.amp.app, observed=False)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    def _start(self) -> None:
        if self._is_temporary:
            self._exits.callback(shutil.rmtree, self._run_dir, ignore_errors=True)
        self.fleet.start()
        self._exits.callback(self.fleet.stop)
        self.amp.start()
        self._exits.callback(self.amp.stop)
        self.stack.start()
        self._exits.callback(self.stack.stop)
        kubernetes = self.fleet.kubernetes
        self.stack.register_cluster(self._scenario.cluster.name, kubernetes.url, kubernetes.ca_pem)
        for group in self._scenario.cluster.groups:
            if group.kind == "managed_node_group":
                self.stack.eks.register_node_group(
                    self._scenario.cluster.name, group.name, node_repair=group.node_repair
                )
        self.stack.deploy_policy(yaml.safe_dump(self._scenario.full_policy))
        self.amp.wait_until_scraped()
        if not self._scenario.scans:
            self.stack.scheduler.disable("Scan")

    @property
    def cluster_name(self) -> str:
        """The scenario's cluster."""
        return self._scenario.cluster.name
