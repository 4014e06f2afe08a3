"""Stacks for the tests of the laptop's AWS.

moto's state belongs to the process, so stacks live one after the other: one for each module.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from local.aws.front import Front
from local.aws.lambdas import FunctionSpec, LambdaService
from local.aws.stack import LocalStack
from local.calls import CallLog, FaultPlan
from local.identity import Identities

DATA = Path(__file__).parents[2] / "data" / "aws"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(
        DATA / "template.yaml",
        run_dir=tmp_path_factory.mktemp("run"),
        async_retry_delays_s=(0.05, 0.05),
        sqs_retry_s=0.2,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    running = Front(identities=Identities(), log=CallLog(), faults=FaultPlan(), region="eu-west-1")
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module", params=["awslambdaric", "bootstrap"])
def lambdas(
    request: pytest.FixtureRequest, front: Front, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LambdaService]:
    if request.param == "awslambdaric":
        pytest.importorskip("awslambdaric", exc_type=ImportError)
    service = LambdaService(
        front,
        run_dir=tmp_path_factory.mktemp("run"),
        runtime=request.param,
        environment={"EXTRA": "given", "OURS": "given"},
        async_retry_delays_s=(0.05,),
        max_workers=3,
    )
    yield service
    service.stop()


@pytest.fixture
def make_function(lambdas: LambdaService, tmp_path: Path) -> Callable[..., FunctionSpec]:
    """Makes a function from source text."""

    def make(source: str, name: str = "made", **fields: Any) -> FunctionSpec:
        code = tmp_path / name
        code.mkdir()
        (code / "app.py").write_text(source)
        arn = f"arn:aws:lambda:eu-west-1:123456789012:function:{name}"
        values = {"handler": "app.handler", "timeout_s": 5.0, **fields}
        spec = FunctionSpec(name.title(), name, name, arn, code=code, **values)
        lambdas.create(spec)
        return spec

    return make
