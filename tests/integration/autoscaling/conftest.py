"""A server with both fronts, clients that talk to it, and a clock that the test moves."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.config import Config

from local.aws.autoscaling_model import CapacityModel
from local.aws.autoscaling_server import CapacityServer
from local.aws.autoscaling_types import CapacityHooks

if TYPE_CHECKING:
    from mypy_boto3_autoscaling import AutoScalingClient
    from mypy_boto3_ec2 import EC2Client

START = 1_767_225_600.25  # 2026-01-01T00:00:00.25Z: the fraction must not reach launch times


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.at = START

    def __call__(self) -> float:
        return self.at

    def forward(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def heard() -> list[tuple[str, str]]:
    """Hook calls as (hook, instance id), in order."""
    return []


@pytest.fixture
def model(clock: Clock, heard: list[tuple[str, str]]) -> CapacityModel:
    return CapacityModel(
        clock=clock,
        hooks=CapacityHooks(
            on_launch=lambda instance: heard.append(("launch", instance.instance_id)),
            on_shutdown=lambda instance: heard.append(("shutdown", instance.instance_id)),
            on_terminate=lambda instance: heard.append(("terminate", instance.instance_id)),
            on_reboot=lambda instance: heard.append(("reboot", instance.instance_id)),
            on_stop=lambda instance: heard.append(("stop", instance.instance_id)),
        ),
    )


@pytest.fixture
def server(model: CapacityModel) -> Iterator[CapacityServer]:
    with CapacityServer(model) as running:
        yield running


def config(**changes: object) -> Config:
    """Client settings: no retries, so that a test sees each answer."""
    return Config(retries={"total_max_attempts": 1}, **changes)  # type: ignore[arg-type]


@pytest.fixture
def autoscaling(server: CapacityServer) -> "Iterator[AutoScalingClient]":
    client = boto3.client(
        "autoscaling",
        region_name="us-east-1",
        endpoint_url=server.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=config(),
    )
    yield client
    client.close()


@pytest.fixture
def ec2(server: CapacityServer) -> "Iterator[EC2Client]":
    client = boto3.client(
        "ec2",
        region_name="us-east-1",
        endpoint_url=server.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=config(),
    )
    yield client
    client.close()
