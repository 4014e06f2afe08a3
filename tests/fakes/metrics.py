"""AMP in memory: scripted answers, and a record of what was asked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from nodemend.application.ports import QueryResult, RuleGroupsResult
from nodemend.domain.policy import ClusterPolicy
from nodemend.domain.reasons import Reason

Answer = QueryResult | Callable[[datetime], QueryResult]


@dataclass(frozen=True, slots=True)
class Asked:
    """One query as it was asked."""

    cluster: str
    key: str
    query: str
    at: datetime


@dataclass(slots=True)
class _Script:
    matches: str
    answer: Answer
    times: int | None


class FakeMetrics:
    """Answers by key (a rule's id) or by a part of the query; whatever is not scripted is empty.

    Empty means: evaluated, and nothing is wrong.
    """

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.groups = RuleGroupsResult()
        """How the rule groups of every workspace fare: nobody has deployed any."""
        self._scripts: list[_Script] = []

    def answer(self, matches: str, answer: Answer, *, times: int | None = None) -> None:
        """Answer so where the key is `matches` or the query contains it.

        The newest script that matches wins. `times` counts queries, None is for ever; a callable
        gets the time of the query.
        """
        self._scripts.insert(0, _Script(matches, answer, times))

    def fail(self, code: str = "amp_unavailable", *, matches: str = "") -> None:
        """Leave matching queries (default: all) without a usable answer."""
        self.answer(matches, QueryResult(problem=Reason(code, f"scripted: {code}")))

    def clear(self) -> None:
        """Forget all scripts."""
        self._scripts.clear()

    def query_many(
        self, cluster: ClusterPolicy, queries: Mapping[str, str], at: datetime
    ) -> Mapping[str, QueryResult]:
        """Return the scripted answers."""
        return {key: self._ask(cluster, key, query, at) for key, query in queries.items()}

    def rule_groups(self, cluster: ClusterPolicy) -> RuleGroupsResult:
        """Return the scripted groups."""
        return self.groups

    def _ask(self, cluster: ClusterPolicy, key: str, query: str, at: datetime) -> QueryResult:
        self.asked.append(Asked(cluster.name, key, query, at))
        for script in self._scripts:
            if script.times == 0 or not (key == script.matches or script.matches in query):
                continue
            if script.times is not None:
                script.times -= 1
            answer = script.answer
            return answer(at) if callable(answer) else answer
        return QueryResult()
