"""These tests need the client packages (`make test-clients` installs them). Without, they are not collected at all."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clients.clients import TIMEOUT_S, close_servers

MISSING = [
    name
    for name in (
        *("accelerate", "axolotl", "bitsandbytes", "lightning", "llamafactory", "nemo_automodel", "olmo_core", "peft"),
        *("torchao", "torchtitan", "trl", "verl"),
    )
    if find_spec(name) is None
]
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_sessionstart(session: pytest.Session) -> None:
    """Who asks for these tests by name shall hear why there are none."""
    here = Path(__file__).parent
    asked = [Path(arg.split("::")[0]).resolve() for arg in session.config.args]
    if MISSING and any(path.is_relative_to(here) for path in asked):
        raise pytest.UsageError(f"The tests of clients need {', '.join(MISSING)}: run `make test-clients`.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Both runs of a script may take their time; the first of a file imports the client, too."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(3 * TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def _servers() -> Iterator[None]:
    yield
    close_servers()
