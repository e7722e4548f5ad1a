"""Loaded by pytest through its entry point; so it imports nothing that takes time before a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from everystop.testing.served import MockService


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "everystop(**settings): settings for the fixture everystop_server")


@pytest.fixture
def everystop_server(request: pytest.FixtureRequest) -> Iterator[MockService]:
    """A scheduler on the mock executor: real ports, real gRPC. Settings come from `@pytest.mark.everystop(...)`."""
    from everystop.testing.served import serve_mock

    marker = request.node.get_closest_marker("everystop")
    with serve_mock(**(marker.kwargs if marker else {})) as service:
        yield service
