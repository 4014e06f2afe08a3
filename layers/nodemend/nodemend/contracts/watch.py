"""Input and result of watch_incidents."""

from pydantic import BaseModel, ConfigDict, Field


class ExecutionEnded(BaseModel):
    """Detail of "Step Functions Execution Status Change"; AWS may add fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    execution_arn: str = Field(alias="executionArn")
    name: str
    status: str


class WatchIncidentsRequest(BaseModel):
    """One ended execution, or (none) the scheduled look at everything."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ended: ExecutionEnded | None = None


class WatchIncidentsResult(BaseModel):
    """What the watch repaired, for the log."""

    closed: int = 0
    freed_slots: int = 0
    sent_events: int = 0
    unsent_events: int = 0
    restored_nodes: int = 0
    left_cordons: int = 0
    overdue_incidents: int = 0
    silent_scans: int = 0
    unseen_clusters: int = 0


class WatchEvent(BaseModel):
    """What the function is called with: an EventBridge event, or an empty schedule."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    detail: ExecutionEnded | None = None

    def to_request(self) -> WatchIncidentsRequest:
        """Return the use case's request."""
        return WatchIncidentsRequest(ended=self.detail)
