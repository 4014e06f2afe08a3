"""The detection rules and tables as data, each row with its reason and source."""

import csv
import io
from collections.abc import Iterable
from importlib import resources

import yaml
from pydantic import BaseModel, ConfigDict, Field

from nodemend.domain.faults import Family, FaultClass, FaultKind, Verdict
from nodemend.domain.rules import Catalogue, Rule, XidEntry


class _RuleRow(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = Field(pattern=r"^[a-z][a-z0-9-]+$")
    fault_class: FaultClass
    verdict: Verdict
    verdict_by_xid: bool = False
    kind: FaultKind
    metrics: tuple[str, ...]
    presence: str = ""
    absence_is_the_fault: bool = False
    thresholds: dict[str, float] = {}
    promql: str
    summary: str
    why: str = Field(min_length=20)
    source: str = Field(min_length=3)


class _XidRow(BaseModel):
    model_config = ConfigDict(extra="forbid")

    code: int = Field(ge=1, le=1023)
    mnemonic: str
    verdict: Verdict
    action: str


class _InstanceTypeRow(BaseModel):
    model_config = ConfigDict(extra="forbid")

    instance_type: str
    gpus: int = Field(ge=1, le=16)


def _read(name: str) -> str:
    return resources.files(__package__ or "nodemend.catalogue").joinpath(name).read_text("utf-8")


def _rows(name: str) -> Iterable[dict[str, str]]:
    lines = [line for line in _read(name).splitlines() if not line.startswith("#")]
    return csv.DictReader(io.StringIO("\n".join(lines)))


def load_catalogue() -> Catalogue:
    """Read and check all catalogue files of the package.

    Raises:
        ValueError: if a file is malformed (a packaging fault: the unit tests load it too).
    """
    rules = []
    for family in Family:
        for raw in yaml.safe_load(_read(f"{family}.yaml")):
            row = _RuleRow.model_validate(raw)
            rules.append(
                Rule(
                    id=row.id,
                    family=family,
                    fault_class=row.fault_class,
                    verdict=row.verdict,
                    kind=row.kind,
                    promql=row.promql,
                    thresholds=row.thresholds,
                    summary=row.summary,
                    why=row.why,
                    source=row.source,
                    metrics=row.metrics,
                    presence=row.presence,
                    is_absence_the_fault=row.absence_is_the_fault,
                    is_verdict_by_xid=row.verdict_by_xid,
                )
            )
    xids = [_XidRow.model_validate(row) for row in _rows("xid.csv")]
    types = [_InstanceTypeRow.model_validate(row) for row in _rows("instance_types.csv")]
    names: dict[str, list[str]] = yaml.safe_load(_read("metrics.yaml"))
    return Catalogue(
        rules=tuple(rules),
        metric_names={name: tuple(aliases) for name, aliases in names.items()},
        xids={x.code: XidEntry(x.code, x.mnemonic, x.verdict, x.action) for x in xids},
        gpus_by_instance_type={row.instance_type: row.gpus for row in types},
    )
