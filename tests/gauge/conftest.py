"""The cells and the questions of a run."""

from __future__ import annotations

import pytest

from tests.gauge.cells import CELLS
from tests.gauge.harness import Gauge, full_questions, quick_questions, short_questions, starved_questions

SHORT_PER_KIND = 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full-matrix")
        cells = [cell for cell in CELLS if full or cell.sampled]
        metafunc.parametrize("cell", cells, ids=[cell.name for cell in cells])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full-matrix"):
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(scope="session")
def full_matrix(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full-matrix"))


@pytest.fixture(scope="session")
def gauge(request: pytest.FixtureRequest, full_matrix: bool) -> Gauge:
    if full_matrix:
        asked = full_questions(request.config.getoption("--questions"))
        return Gauge(asked, starved_questions(), tokens=None)
    return Gauge(short_questions(SHORT_PER_KIND), quick_questions())
