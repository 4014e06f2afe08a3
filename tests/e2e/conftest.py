import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ROOT / "local" / "scenarios"

_IDS = re.compile(
    r"i-[0-9a-f]{17}"  # instances
    r"|[0-9A-HJKMNP-TV-Z]{26}"  # incidents
    r"|ip-\d+-\d+-\d+-\d+\.ec2\.internal"  # nodes
    r"|(?<=/)[a-z-]+-[a-z0-9]{8,10}-[a-z0-9]{5}(?=$)"  # pods of Deployments
)


@dataclass(frozen=True)
class Run:
    """One run of the command line."""

    status: int
    text: str
    result: dict[str, Any]

    @property
    def event_types(self) -> list[str]:
        return [event["detail_type"] for event in self.result["events"]]

    def by_role(self) -> dict[str, Any]:
        """What happened, times dropped and ids replaced by their order of appearance."""
        roles: dict[str, str] = {}

        def role(text: str) -> str:
            return _IDS.sub(lambda m: roles.setdefault(m.group(0), f"#{len(roles)}"), text)

        return {
            "mutations": [
                (row["caller"], row["verb"], role(row["target"]))
                for row in self.result["api_mutations"]
            ],
            "events": [
                (row["detail_type"], row["outcome"], row["reason"]) for row in self.result["events"]
            ],
        }


@pytest.fixture
def run_scenario(tmp_path):
    """Run a scenario file through the command line, as a person does."""

    def run(scenario: Path, *options: str) -> Run:
        out = tmp_path / "out.json"
        out.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "local", "run", str(scenario), "--json", str(out), *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        result = json.loads(out.read_text()) if out.exists() else {}
        return Run(done.returncode, done.stdout + done.stderr, result)

    return run
