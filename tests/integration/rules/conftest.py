"""One run of promtool serves all tests of the rules."""

import pytest

from tests.integration.rules.scenarios import load_scenarios, published_scrape, run_promtool


@pytest.fixture(scope="session")
def promtool_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What promtool says of every scenario."""
    folder = tmp_path_factory.mktemp("rules")
    return run_promtool(folder, [*load_scenarios(), *published_scrape()])
