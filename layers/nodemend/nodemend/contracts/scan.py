"""Input and result of a scheduled scan."""

from pydantic import BaseModel, ConfigDict

from nodemend.domain.faults import Family


class ScanGpuHealthRequest(BaseModel):
    """What the schedule sends; a wrong family fails the invocation at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Family


class ScanGpuHealthResult(BaseModel):
    """What the scan did, for the log."""

    family: Family
    clusters: int
    findings: int
    unknown_rules: int
    announced: int
