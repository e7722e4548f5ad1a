import os
from collections.abc import Iterator

import pytest
import structlog

from executor_svc.model.threads import configure_environment

# Before anything imports torch: as in an executor, tests share their cores with other processes.
configure_environment(threads=0)


@pytest.fixture(scope="session", autouse=True)
def default_settings() -> Iterator[None]:
    """Tests don't see the settings of the shell that they run in; the cache of models is left as it is."""
    names = [name for name in os.environ if name.startswith("EVERYSTOP_") and name != "EVERYSTOP_CACHE"]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """`capture_logs` leaves structlog configured, to stdout, and what configures it only where nobody has would not."""
    was_configured = structlog.is_configured()
    yield
    if not was_configured:
        structlog.reset_defaults()
