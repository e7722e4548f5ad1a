import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers")


def heavy_modules_after(statement: str) -> str:
    """What of `HEAVY` a fresh interpreter has imported after a statement."""
    code = f"import sys\n{statement}\nprint(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


@pytest.mark.parametrize(
    "statement",
    [
        "import scheduler_svc.__main__, scheduler_svc.server",
        "import executor_svc.__main__, executor_svc.server, executor_svc.mock.backend",
        "import everystop.cli, everystop.serve, everystop.client, everystop.commands",
        "import everystop.testing",
        "import everystop.testing.pytest_plugin",
    ],
)
def test_the_light_parts_stay_light(statement: str) -> None:
    assert heavy_modules_after(statement) == ""


def test_the_check_sees_heavy_modules() -> None:
    assert heavy_modules_after("sys.modules['torch'] = sys") == "torch"


def test_the_help_of_the_command_stays_light() -> None:
    statement = (
        "from click.testing import CliRunner\n"
        "from everystop.cli import cli\n"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0"
    )
    assert heavy_modules_after(statement) == ""


def test_the_plugin_of_pytest_imports_no_grpc_by_itself() -> None:
    code = "import sys, everystop.testing.pytest_plugin; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
