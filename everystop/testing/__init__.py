"""For tests of code that talks to Everystop: a real service on the mock backend, and the scheduler's core by hand.

    with testing.serve_mock(max_num_seqs=4) as service:      # real ports, real gRPC
        client = Client(service.address)

    crank = testing.cranked(num_blocks=8)                    # no processes, threads, clocks or ports
    request_id = crank.add("Hello", max_tokens=3)
    crank.run()
    crank.tokens(request_id)

pytest finds the fixture `everystop_server` by itself. Everything here needs the extra `scheduler` alone, no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everystop.testing.crank import Crank, CrankedStep, cranked
    from everystop.testing.served import MockService, serve_mock

__all__ = ["Crank", "CrankedStep", "MockService", "cranked", "serve_mock"]

# pytest imports this package in every run, also where nobody uses it: what is heavy loads at first use.
_MODULES = {
    "Crank": "everystop.testing.crank",
    "CrankedStep": "everystop.testing.crank",
    "cranked": "everystop.testing.crank",
    "MockService": "everystop.testing.served",
    "serve_mock": "everystop.testing.served",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
