"""One AMP over a small fleet for all tests of this folder: a start costs six seconds."""

import time
from types import SimpleNamespace

import botocore.auth
import pytest
import requests
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from requests_aws4auth import AWS4Auth

from local.amp.exporter import Dialect, GpuFleet, MigInstance, Pod
from local.amp.stack import LocalAmp
from local.calls import CallLog, FaultPlan
from local.identity import Identities

REGION = "us-east-1"


@pytest.fixture(scope="session")
def site():
    """The running AMP, its fleet, and when it was first scraped. Tests undo what they do."""
    fleet = GpuFleet("prod")
    for number in range(1, 5):
        fleet.add_node(f"ip-10-0-1-{number}.ec2.internal", pod=Pod("train", "job-0"))
    fleet.add_node("ip-10-0-1-9.ec2.internal", dialect=Dialect(hostname_label="hostname"))
    mig = {0: [MigInstance("2g.20gb", number) for number in (3, 5, 6)]}
    fleet.add_node("ip-10-0-2-1.ec2.internal", "p4de.24xlarge", mig=mig)
    identities, calls, faults = Identities(), CallLog(), FaultPlan()
    amp = LocalAmp(
        {"ws-1": [fleet]}, identities=identities, calls=calls, faults=faults, region=REGION
    )
    begun = time.monotonic()
    with amp:
        ready_s = time.monotonic() - begun
        amp.wait_until_scraped()
        yield SimpleNamespace(
            amp=amp,
            fleet=fleet,
            identities=identities,
            calls=calls,
            faults=faults,
            url=f"{amp.url}/workspaces/ws-1/api/v1",
            prometheus=amp.prometheus["ws-1"],
            ready_s=ready_s,
            scraped_at=time.time(),
        )


@pytest.fixture
def eventually():
    """Poll a condition until it holds and return its value; fail after some seconds."""

    def wait(condition, within_s=10.0):
        deadline = time.monotonic() + within_s
        while True:
            found = condition()
            if found:
                return found
            assert time.monotonic() < deadline, f"not within {within_s} s"
            time.sleep(0.05)

    return wait


@pytest.fixture
def signer(site):
    """Make a requests auth for a caller."""

    def make(caller="verify_fault", service="aps", region=REGION, credential=None):
        key = credential or site.identities.issue(caller)
        return AWS4Auth(
            key.access_key_id,
            key.secret_access_key,
            region,
            service,
            session_token=key.session_token,
        )

    return make


@pytest.fixture
def ask(site, signer):
    """Send a signed POST form to the front, as the product does."""

    def post(resource="query", auth=None, **form):
        return requests.post(f"{site.url}/{resource}", data=form, auth=auth or signer(), timeout=30)

    return post


@pytest.fixture
def botocore_auth(site):
    """Sign a prepared request with botocore."""

    def sign(prepared, caller="verify_fault"):
        key = site.identities.issue(caller)
        aws = AWSRequest(prepared.method, prepared.url, dict(prepared.headers), prepared.body)
        keys = Credentials(key.access_key_id, key.secret_access_key, key.session_token)
        botocore.auth.SigV4Auth(keys, "aps", REGION).add_auth(aws)
        prepared.headers.update(dict(aws.headers.items()))
        return prepared

    return sign
