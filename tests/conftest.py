import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from executor_svc.model.threads import configure_environment

# A shell starts its background jobs with SIGINT ignored, and their children would inherit that; tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    """Every log line from "info" on, whatever tests before this one have configured."""
    before = structlog.get_config() if structlog.is_configured() else {}
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    with capture_logs() as captured:
        yield captured
    structlog.reset_defaults()
    if before:
        structlog.configure(**before)
