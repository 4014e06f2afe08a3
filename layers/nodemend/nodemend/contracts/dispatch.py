"""Input and result of dispatch_incidents."""

from pydantic import BaseModel, ConfigDict, Field


class DispatchHint(BaseModel):
    """Body of a message in the dispatch queue: something changed for this incident."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    cluster: str
    incident_id: str = Field(default="", description="Empty: a slot was freed.")


class DispatchIncidentsRequest(BaseModel):
    """Hints of one batch; none: the scheduled look at all clusters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hints: tuple[DispatchHint, ...] = ()


class DispatchIncidentsResult(BaseModel):
    """What was decided, for the log."""

    admitted: int = 0
    waiting: int = 0
    ended: int = 0
    restarted: int = 0


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    body: str


class DispatchEvent(BaseModel):
    """What the function is called with: a batch of the dispatch queue, or an empty schedule."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    records: tuple[_Record, ...] = Field(default=(), alias="Records")

    def to_request(self) -> DispatchIncidentsRequest:
        """Return the use case's request.

        Raises:
            ValidationError: if a message is no hint; the batch goes to the DLQ in the end.
        """
        hints = tuple(DispatchHint.model_validate_json(record.body) for record in self.records)
        return DispatchIncidentsRequest(hints=hints)
