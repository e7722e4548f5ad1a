"""The benchmarks, on the mock: they run, print one object, and see what they are there to see."""

import json
import subprocess
import sys


def run_bench(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "everystop", "bench", *arguments, "--executor=mock", "--repeats=1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_split_compares_the_service_with_the_bare_loop():
    figures = run_bench("split", "--streams=4", "--requests=8")
    assert figures["streams"] == 4
    assert figures["ratio"] == round(figures["split_tokens_per_s"] / figures["bare_tokens_per_s"], 4)
    assert 0 < figures["ratio"] < 1.5
    assert 0 <= figures["executor_idle_share"] < 1
    assert 0 < figures["plan_bytes_per_step_p50"] < 64


def test_batching_shows_what_static_batches_waste():
    figures = run_bench("batching", "--seqs=8", "--requests=48", "--mean-tokens=40")
    assert figures["ratio"] == round(figures["continuous_tokens_per_s"] / figures["static_tokens_per_s"], 4)
    assert figures["ratio"] > 1.2
