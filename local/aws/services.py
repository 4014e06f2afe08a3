"""Small services that the front answers itself: STS AssumeRole, EKS clusters, SNS messages."""

import base64
import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from xml.sax.saxutils import escape

from werkzeug.wrappers import Response

from local.aws.front import Front
from local.aws.wire import AwsRequest, error_response, json_response


class StsService:
    """Gives out credentials for any role, under the name of the caller that assumes it.

    So a call made with a cluster's role is still known as the function's own.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._parents: dict[str, str] = {}
        front.route("sts", self.handle, frozenset({"AssumeRole"}))

    def origin(self, access_key_id: str) -> str:
        """Return the key that a role was first assumed with; another key is its own origin."""
        return self._parents.get(access_key_id, access_key_id)

    def handle(self, request: AwsRequest) -> Response:
        """Serve AssumeRole."""
        arn = request.form.get("RoleArn", "")
        match = re.fullmatch(r"arn:(aws[^:]*):iam::(\d{12}):role/(?:.*/)?([^/]+)", arn)
        session = request.form.get("RoleSessionName", "")
        if match is None or not re.fullmatch(r"[\w+=,.@-]{2,64}", session):
            message = f"{arn or 'RoleArn'} or the session name is invalid"
            return error_response(request, 400, "ValidationError", message)
        partition, account, role = match.groups()
        credential = self._front.identities.issue(request.caller)
        self._parents[credential.access_key_id] = self.origin(request.access_key_id)
        duration = timedelta(seconds=int(request.form.get("DurationSeconds", 3600)))
        expires = (datetime.now(UTC) + duration).strftime("%Y-%m-%dT%H:%M:%SZ")
        user_arn = f"arn:{partition}:sts::{account}:assumed-role/{role}/{session}"
        body = (
            '<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            "<AssumeRoleResult><AssumedRoleUser>"
            f"<AssumedRoleId>AROA{uuid.uuid4().hex[:16].upper()}:{escape(session)}</AssumedRoleId>"
            f"<Arn>{escape(user_arn)}</Arn></AssumedRoleUser><Credentials>"
            f"<AccessKeyId>{credential.access_key_id}</AccessKeyId>"
            f"<SecretAccessKey>{escape(credential.secret_access_key)}</SecretAccessKey>"
            f"<SessionToken>{escape(credential.session_token or '')}</SessionToken>"
            f"<Expiration>{expires}</Expiration></Credentials></AssumeRoleResult>"
            f"<ResponseMetadata><RequestId>{uuid.uuid4()}</RequestId></ResponseMetadata>"
            "</AssumeRoleResponse>"
        )
        return Response(body, content_type="text/xml")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A registered EKS cluster."""

    name: str
    endpoint: str
    ca_pem: str
    version: str
    created_at: float


class EksService:
    """Describes the clusters that emulators have registered."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._clusters: dict[str, Cluster] = {}
        self._node_groups: dict[tuple[str, str], dict[str, object]] = {}
        served = {"DescribeCluster", "DescribeNodegroup", "ListClusters", "ListNodegroups"}
        front.route("eks", self.handle, frozenset(served))

    def register(self, name: str, endpoint: str, ca_pem: str, version: str = "1.33") -> None:
        """Make a cluster known; a second registration replaces the first."""
        self._clusters[name] = Cluster(name, endpoint, ca_pem, version, time.time())

    def register_node_group(
        self, cluster: str, name: str, *, status: str = "ACTIVE", node_repair: bool = False
    ) -> None:
        """Make a managed node group known; a second registration replaces the first."""
        self._node_groups[cluster, name] = {
            "nodegroupName": name,
            "clusterName": cluster,
            "status": status,
            "nodeRepairConfig": {"enabled": node_repair},
        }

    def handle(self, request: AwsRequest) -> Response:
        """Serve what a cluster and its node groups are."""
        if request.action == "ListClusters":
            return json_response({"clusters": sorted(self._clusters)})
        if request.action in ("DescribeNodegroup", "ListNodegroups"):
            return self._node_group(request)
        cluster = self._clusters.get(request.target)
        if cluster is None:
            message = f"No cluster found for name: {request.target}."
            return error_response(request, 404, "ResourceNotFoundException", message)
        return json_response({"cluster": self._describe(cluster)})

    def _node_group(self, request: AwsRequest) -> Response:
        parts = request.path.strip("/").split("/")
        if request.action == "ListNodegroups":
            names = sorted(name for cluster, name in self._node_groups if cluster == parts[1])
            return json_response({"nodegroups": names})
        found = self._node_groups.get((parts[1], parts[3]))
        if found is None:
            message = f"No node group found for name: {parts[3]}."
            return error_response(request, 404, "ResourceNotFoundException", message)
        return json_response({"nodegroup": found})

    def _describe(self, cluster: Cluster) -> dict[str, object]:
        account, region = self._front.account_id, self._front.region
        return {
            "name": cluster.name,
            "arn": f"arn:aws:eks:{region}:{account}:cluster/{cluster.name}",
            "createdAt": cluster.created_at,
            "version": cluster.version,
            "endpoint": cluster.endpoint,
            "status": "ACTIVE",
            "certificateAuthority": {"data": base64.b64encode(cluster.ca_pem.encode()).decode()},
            "accessConfig": {"authenticationMode": "API"},
            "platformVersion": "eks.1",
            "tags": {},
        }


@dataclass(frozen=True, slots=True)
class PublishedMessage:
    """A message that was published to an SNS topic."""

    at: float
    caller: str
    topic_arn: str
    subject: str
    message: str


InvokeLater = Callable[[str, bytes], object]
"""Runs a function (by ARN) with an event, asynchronously."""


class SnsRecorder:
    """Remembers what was published to topics; moto delivers it to queues, this to functions."""

    def __init__(self, front: Front, invoke_later: InvokeLater) -> None:
        self._front = front
        self._invoke_later = invoke_later
        self._functions: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._messages: list[PublishedMessage] = []
        front.route("sns", self.handle, frozenset({"Publish"}))

    def handle(self, request: AwsRequest) -> Response:
        """Serve Publish through moto, and remember the message if it was taken."""
        response = self._front.ask_moto(request)
        if response.status_code == 200:
            message = PublishedMessage(
                at=time.time(),
                caller=request.caller,
                topic_arn=request.form.get("TopicArn") or request.form.get("TargetArn", ""),
                subject=request.form.get("Subject", ""),
                message=request.form.get("Message", ""),
            )
            with self._lock:
                self._messages.append(message)
            for topic_arn, function_arn in self._functions:
                if topic_arn == message.topic_arn:
                    self._invoke_later(function_arn, _sns_event(message))
        return response

    def subscribe_function(self, topic_arn: str, function_arn: str) -> None:
        """Deliver a topic's messages to a function."""
        self._functions.append((topic_arn, function_arn))

    def messages(self) -> list[PublishedMessage]:
        """Return all messages, in the order of arrival."""
        with self._lock:
            return list(self._messages)


def _sns_event(message: PublishedMessage) -> bytes:
    sns: dict[str, object] = {
        "Type": "Notification",
        "MessageId": str(uuid.uuid4()),
        "TopicArn": message.topic_arn,
        "Subject": message.subject or None,
        "Message": message.message,
        "Timestamp": datetime.fromtimestamp(message.at, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        "MessageAttributes": {},
    }
    record = {"EventSource": "aws:sns", "EventVersion": "1.0", "Sns": sns}
    return json.dumps({"Records": [record]}).encode()
