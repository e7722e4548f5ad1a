"""The mock backend: plausible text without a model, in a modelled time, with paging checked and failures on demand."""

from executor_svc.mock.backend import MockBackend

__all__ = ["MockBackend"]
