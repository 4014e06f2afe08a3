"""The emulated cluster with its API server: what others start, and set up scenes on."""

import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

from local.calls import CallLog, FaultPlan
from local.kubernetes.access import ADMIN_GROUP, Authenticator, Rbac, User
from local.kubernetes.api import Api
from local.kubernetes.cluster import Cluster
from local.kubernetes.eviction import Evictions
from local.kubernetes.requests import ApiRequest, ApiResponse
from local.kubernetes.resources import BUILT_IN, Resource
from local.kubernetes.server import ApiServer
from local.kubernetes.timings import Timings


class KubernetesEmulator(Cluster):
    """A Kubernetes cluster at HTTP level: API server, controllers, scheduler and kubelets.

    Scene methods may be called before `start` and at any time after it, from any thread. They are
    not API calls: the call log does not show them. For what a person does on the API use `act_as`.

    Args:
        cluster_name: The cluster's name, for whoever builds an authenticator or a kubeconfig.
        authenticator: Maps bearer tokens to users.
        rbac: What the users may do.
        calls: Where every request is reported.
        faults: Asked before every request is answered.
        clock: Unix seconds; grace periods, budgets and tokens live by it.
        timings: How fast the cluster lives.
        background: Run the controllers on a thread. False: only `tick` runs them.
        custom_resources: Resource types served from CustomResourceDefinitions.
        seed: Uids, generated names and addresses follow from it.
    """

    def __init__(
        self,
        cluster_name: str,
        authenticator: Authenticator,
        rbac: Rbac | None = None,
        *,
        calls: CallLog | None = None,
        faults: FaultPlan | None = None,
        clock: Callable[[], float] = time.time,
        timings: Timings | None = None,
        background: bool = True,
        custom_resources: Iterable[Resource] = (),
        seed: int = 0,
    ) -> None:
        timings = timings if timings is not None else Timings()
        super().__init__(clock, timings, seed)
        self.cluster_name = cluster_name
        self.calls = calls if calls is not None else CallLog(clock)
        self.faults = faults if faults is not None else FaultPlan()
        self._background = background
        self._api = Api(
            registry=self._registry,
            evictions=Evictions(self._registry, conflict_retry_s=timings.conflict_retry_s),
            authenticate=authenticator,
            rbac=rbac if rbac is not None else Rbac(),
            calls=self.calls,
            faults=self.faults,
            resources=(*BUILT_IN, *custom_resources),
        )
        self._server = ApiServer(self._api)

    # --------------------------------------------------------------- life cycle

    def start(self) -> None:
        """Serve on a free port, and run the controllers if they run in the background."""
        self._server.start()
        if self._background:
            self._control_plane.start()

    def stop(self) -> None:
        """Stop both; a second call does nothing. The objects stay."""
        self._server.stop()
        self._control_plane.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """`https://127.0.0.1:PORT`."""
        return self._server.url

    @property
    def ca_pem(self) -> str:
        """The certificate of the authority that signed the server's."""
        return self._server.ca_pem

    def serve(self, resource: Resource) -> None:
        """Serve another custom resource from now on, as after installing its definition."""
        self._api.serve(resource)

    def act_as(
        self,
        caller: str,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
        manager: str = "kubectl",
    ) -> ApiResponse:
        """Make an API call as a cluster administrator of that name: what people do in a scene.

        The call log shows it with this caller; faults apply.
        """
        request = ApiRequest(
            method=method,
            path=path,
            query=query or {},
            content_type=content_type,
            user_agent=f"{manager}/v1.36.2",
            body=body,
        )
        return self._api.handle(request, user=User(caller, (ADMIN_GROUP,)))
