"""`nodemend coverage`: the table, the nodes, and an exit status that scripts can trust."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.credentials import Credentials
from botocore.exceptions import ConfigNotFound

import ops.cli
from nodemend.adapters.amp import AmpMetrics
from nodemend.application.ports import QueryResult, RuleGroupsResult
from nodemend.catalogue import load_catalogue
from nodemend.domain.coverage import read_coverage
from nodemend.domain.findings import Sample
from nodemend.domain.reasons import Reason
from nodemend.domain.rule_health import RecordedRule, RuleGroup
from ops.cli import main
from ops.coverage import metrics_of, place_of
from ops.stack import CommandError, Stack
from tests.fakes.metrics import FakeMetrics

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
POLICY = """
schema_version: 1
mode: dry_run
clusters:
  - {name: train-b, workspace: ws-2, region: eu-west-1, matcher: 'cluster="b"'}
rules:
  ecc-dbe-volatile: {enabled: false}
"""


@dataclass
class Session:
    """A session whose CloudFormation knows one stack."""

    parameters: dict[str, str] = field(
        default_factory=lambda: {
            "ClusterName": "train-a",
            "WorkspaceId": "ws-1",
            "ClusterMatcher": 'cluster="a"',
        }
    )
    region_name: str = "eu-central-1"
    credentials: Any = field(default_factory=lambda: Credentials("a", "b"))

    def client(self, _: str) -> "Session":
        return self

    def describe_stacks(self, **_: Any) -> Any:
        given = [{"ParameterKey": k, "ParameterValue": v} for k, v in self.parameters.items()]
        return {"Stacks": [{"Parameters": given, "Outputs": []}]}

    def get_credentials(self) -> Any:
        if isinstance(self.credentials, Exception):
            raise self.credentials
        return self.credentials


def stack(session: Session | None = None) -> Stack:
    return Stack("nodemend", session or Session())  # type: ignore[arg-type]


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> FakeMetrics:
    fake = FakeMetrics()
    monkeypatch.setattr(ops.cli, "metrics_of", lambda _: fake)
    return fake


def exports(metrics: FakeMetrics, **counts: int) -> None:
    known = load_catalogue()
    needed = read_coverage(known.rules, known.metric_names, []).metrics
    rows = {one.metric: counts.get(one.metric, 16) for one in needed}
    samples = tuple(Sample({"metric": m}, float(n), NOW) for m, n in rows.items() if n)
    metrics.answer("coverage", QueryResult(samples, samples_processed=512))


def run(*words: str) -> int:
    return main(["coverage", *words], stack_of=lambda *_: stack(), now=lambda: NOW)


def test_a_cluster_that_exports_everything_has_exit_status_0(
    metrics: FakeMetrics, capsys: pytest.CaptureFixture[str]
) -> None:
    exports(metrics)

    assert run("--cluster", "train-a") == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["metric", "have", "it", "needed", "by", "helps"]
    temperature = next(line for line in lines if line.startswith("DCGM_FI_DEV_GPU_TEMP"))
    assert "16 of 16" in temperature
    assert "gpu-lost" in temperature
    assert lines[-2:] == ["Every rule sees.", "AMP processed 512 samples for this."]
    assert {asked.cluster for asked in metrics.asked} == {"train-a"}
    assert 'cluster="a"' in metrics.asked[0].query


def test_what_is_blind_is_named_with_nodes_and_exit_status_1(
    metrics: FakeMetrics, capsys: pytest.CaptureFixture[str]
) -> None:
    exports(metrics, ecc_dbe_volatile=8, xid_count=0)
    metrics.answer("lacking", QueryResult((Sample({"node": "n-1"}, 8.0, NOW),)))

    assert run("--cluster", "train-a") == 1

    out, err = capsys.readouterr()
    assert "ecc-dbe-volatile is blind: 8 of 16 GPUs have DCGM_FI_DEV_ECC_DBE_VOL_TOTAL" in out
    assert "xid-count is blind: nobody exports DCGM_EXP_XID_ERRORS_COUNT" in out
    assert "without DCGM_FI_DEV_ECC_DBE_VOL_TOTAL: n-1" in out
    assert err == "nodemend: 2 rules are blind in train-a\n"


def test_what_some_hardware_does_not_have_is_no_failure(
    metrics: FakeMetrics, capsys: pytest.CaptureFixture[str]
) -> None:
    exports(metrics, row_remap_failure=15)
    metrics.answer("lacking", QueryResult())

    assert run("--cluster", "train-a") == 0

    out = capsys.readouterr().out
    assert "row-remap-failed is blind (expected)" in out
    assert "15 of 16 *" in out
    assert "* not all hardware has it" in out
    assert "AMP names no node" in out


def test_a_policy_file_names_the_cluster_and_the_rules_that_are_off(
    metrics: FakeMetrics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    exports(metrics, ecc_dbe_volatile=0)

    assert run("--cluster", "train-b", "--policy", str(path)) == 0

    assert "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL" not in capsys.readouterr().out
    assert 'cluster="b"' in metrics.asked[0].query
    cluster, _ = place_of(stack(), "train-b", path)
    assert (cluster.workspace, cluster.region) == ("ws-2", "eu-west-1")


def test_the_rules_of_a_policy_without_clusters_hold_for_the_stacks_own(
    metrics: FakeMetrics, tmp_path: Path
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("schema_version: 1\nrules: {ecc-dbe-volatile: {enabled: false}}\n")
    exports(metrics, ecc_dbe_volatile=0)

    assert run("--cluster", "train-a", "--policy", str(path)) == 0


@pytest.mark.parametrize("cluster", ["train-b", "Train-a"])
def test_a_cluster_whose_workspace_is_not_known_is_refused(
    metrics: FakeMetrics, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--cluster", cluster) == 1

    assert f"the workspace of {cluster} is not known" in capsys.readouterr().err
    assert metrics.asked == []


def test_an_answer_that_cannot_be_had_is_an_error_and_no_table(
    metrics: FakeMetrics, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.fail("amp_forbidden")

    assert run("--cluster", "train-a") == 1

    out, err = capsys.readouterr()
    assert out == ""
    assert "amp_forbidden" in err


def test_rule_groups_that_fail_are_told_under_the_table(
    metrics: FakeMetrics, capsys: pytest.CaptureFixture[str]
) -> None:
    exports(metrics)
    failing = RecordedRule("nodemend:a:b", "err", "same labelset", NOW)
    metrics.groups = RuleGroupsResult((RuleGroup("rules", "nodemend-a", 30.0, 1.0, (failing,)),))

    assert run("--cluster", "train-a") == 0

    assert "rule group nodemend-a/nodemend:a:b: " in capsys.readouterr().out
    metrics.groups = RuleGroupsResult(problem=Reason("amp_forbidden", "allow aps:ListRules"))
    assert run("--cluster", "train-a") == 0
    assert "does not list its rule groups: amp_forbidden" in capsys.readouterr().out


def test_amp_is_asked_with_the_operators_credentials() -> None:
    assert isinstance(metrics_of(stack()), AmpMetrics)


@pytest.mark.parametrize("credentials", [None, ConfigNotFound(path="x")])
def test_without_credentials_it_says_so(credentials: Any) -> None:
    with pytest.raises(CommandError, match=r"credentials|config"):
        metrics_of(stack(Session(credentials=credentials)))
