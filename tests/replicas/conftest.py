"""The store in which replicas meet."""

from collections.abc import Iterator

import pytest

from tests.replicas.jobs import MeetingPlace


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    place = MeetingPlace()
    yield place.address
    place.close()
