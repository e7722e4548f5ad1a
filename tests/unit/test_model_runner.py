"""The data type that the model is computed in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor_svc.model import runner


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("avx2 avx512f", torch.float32),
        ("avx512f avx512_bf16", torch.bfloat16),
        ("amx_bf16 amx_tile", torch.bfloat16),
        ("asimd bf16 i8mm", torch.bfloat16),
    ],
)
def test_auto_takes_bfloat16_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: torch.dtype
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: f"flags\t: fpu {flags} sse\n")
    assert runner._choose_dtype("auto") is expected


def test_a_dtype_that_is_named_is_taken() -> None:
    assert runner._choose_dtype("float32") is torch.float32
    assert runner._choose_dtype("bfloat16") is torch.bfloat16
