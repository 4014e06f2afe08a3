"""The detection rules and tables as data, each row with its reason and source."""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import resources

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from nodemend.domain.faults import Family, FaultClass, FaultKind, Scope, Verdict
from nodemend.domain.generations import Generation
from nodemend.domain.rules import Catalogue, Recording, RecordingGroup, Rule, XidEntry

NOT_THERE = "No code of this generation"
"""Why a code is `suspect` on a GPU whose generation does not have it."""


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
    scope: Scope = Scope.GPU
    second_signal: str = ""
    degraded: str = ""
    opt_in: str = ""


class _RecordingRow(BaseModel):
    model_config = ConfigDict(extra="forbid")

    record: str = Field(pattern=r"^nodemend:[a-z0-9_]+:[a-z0-9_]+$")
    promql: str
    why: str = Field(min_length=20)


class _RecordingGroupRow(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^nodemend-[a-z-]+$")
    interval_s: int = Field(ge=30)
    recordings: tuple[_RecordingRow, ...] = Field(min_length=1)


class _XidRow(BaseModel):
    model_config = ConfigDict(extra="forbid")

    code: int = Field(ge=1, le=1023)
    mnemonic: str
    generations: tuple[Generation, ...]
    verdict: Verdict
    action: str
    overruled: tuple[str, ...]
    reason: str

    @field_validator("generations", "overruled", mode="before")
    @classmethod
    def _words(cls, cell: str) -> tuple[str, ...]:
        return tuple(cell.split())

    def entry(self) -> XidEntry:
        return XidEntry(
            self.code,
            self.mnemonic,
            self.verdict,
            self.action,
            self.overruled,
            self.reason,
            self.generations,
        )


class _InstanceTypeRow(BaseModel):
    model_config = ConfigDict(extra="forbid")

    instance_type: str
    gpus: int = Field(ge=1, le=16)


def _read(name: str) -> str:
    return resources.files(__package__ or "nodemend.catalogue").joinpath(name).read_text("utf-8")


def _rows(name: str) -> Iterable[dict[str, str]]:
    lines = [line for line in _read(name).splitlines() if not line.startswith("#")]
    return csv.DictReader(io.StringIO("\n".join(lines)))


def _xid_table(rows: Iterable[XidEntry]) -> Iterator[XidEntry]:
    """Yield one entry per code: its row for whichever GPU, with those for generations inside.

    Raises:
        ValueError: if two rows of a code speak of the same GPUs.
    """
    by_code: dict[int, list[XidEntry]] = {}
    for row in rows:
        by_code.setdefault(row.code, []).append(row)
    for code, entries in by_code.items():
        named = [generation for entry in entries for generation in entry.generations]
        general = [entry for entry in entries if not entry.generations]
        if len(named) > len(set(named)) or len(general) > 1:
            raise ValueError(f"xid.csv: rows of {code} speak of the same GPUs")
        usual = general[0] if general else _not_there(entries[0])
        yield replace(
            usual,
            variants=tuple(one for one in entries if one.generations),
            of_unknown_model=None if general else _shared(entries),
        )


def _shared(entries: list[XidEntry]) -> XidEntry | None:
    """Return what holds wherever the code exists: a GPU that reports it does have it."""
    first = entries[0]
    is_same = all((one.verdict, one.action) == (first.verdict, first.action) for one in entries)
    return replace(first, generations=()) if is_same else None


def _not_there(entry: XidEntry) -> XidEntry:
    """Return the entry of a code for GPUs that should not have it."""
    return XidEntry(entry.code, entry.mnemonic, Verdict.SUSPECT, "none", reason=NOT_THERE)


def _with_instance_types(promql: str, types: Iterable[_InstanceTypeRow]) -> str:
    """Replace each `<<types with N GPUs>>` by a regular expression for them."""
    for gpus in sorted({row.gpus for row in types}):
        names = [row.instance_type for row in types if row.gpus == gpus]
        promql = promql.replace(f"<<types with {gpus} GPUs>>", "|".join(names).replace(".", "[.]"))
    return promql


def load_catalogue() -> Catalogue:
    """Read and check all catalogue files of the package.

    Raises:
        ValueError: if a file is malformed (a packaging fault: the unit tests load it too).
    """
    types = [_InstanceTypeRow.model_validate(row) for row in _rows("instance_types.csv")]
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
                    promql=_with_instance_types(row.promql, types),
                    thresholds=row.thresholds,
                    summary=row.summary,
                    why=row.why,
                    source=row.source,
                    metrics=row.metrics,
                    presence=row.presence,
                    is_absence_the_fault=row.absence_is_the_fault,
                    is_verdict_by_xid=row.verdict_by_xid,
                    scope=row.scope,
                    second_signal=row.second_signal,
                    degraded=row.degraded,
                    opt_in=row.opt_in,
                )
            )
    xids = _xid_table(_XidRow.model_validate(row).entry() for row in _rows("xid.csv"))
    groups = [
        _RecordingGroupRow.model_validate(raw) for raw in yaml.safe_load(_read("recordings.yaml"))
    ]
    names: dict[str, list[str]] = yaml.safe_load(_read("metrics.yaml"))
    return Catalogue(
        rules=tuple(rules),
        metric_names={name: tuple(aliases) for name, aliases in names.items()},
        xids={entry.code: entry for entry in xids},
        gpus_by_instance_type={row.instance_type: row.gpus for row in types},
        recordings=tuple(
            RecordingGroup(
                group.name,
                group.interval_s,
                tuple(Recording(r.record, r.promql, r.why) for r in group.recordings),
            )
            for group in groups
        ),
    )
