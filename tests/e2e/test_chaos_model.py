"""`everystop chaos` with the default model: what was recomputed after a death has the same tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_nothing_is_lost_and_no_token_changes(model_dir: Path) -> None:
    flags = ["--executor=cpu", f"--model={model_dir}", "--minutes=0.5", "--kills=2", "--stops=1"]
    flags += ["--streams=6", "--items=6", "--max-prompt-tokens=100", "--max-tokens=32"]
    flags += ["--step-timeout-s=10", "--patience-s=120", "--json"]
    finished = subprocess.run(
        [sys.executable, "-m", "everystop", "chaos", *flags], capture_output=True, text=True, check=False, timeout=550
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads(finished.stdout)
    assert (found["lost"], found["wrong_tokens"], found["leaked_blocks"]) == (0, 0, 0)
    assert found["executor_kills"] >= 2
    assert found["scheduler_kills"] == 2
    assert found["completed"] > 0
