"""Why something was decided: one word for machines, one sentence for people."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """What decided, as a stable word and as a sentence that a person can act on.

    Example:
        >>> str(Reason("capacity_guard", "1 of at most 1 node is unavailable"))
        'capacity_guard: 1 of at most 1 node is unavailable'
    """

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"
