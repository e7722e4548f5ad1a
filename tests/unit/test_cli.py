import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import everystop
from everystop import cli


class FakeEntryPoint:
    """Records whether it was imported."""

    def __init__(self, name: str, command: click.Command | ModuleNotFoundError) -> None:
        self.name = name
        self.is_loaded = False
        self._command = command

    def load(self) -> click.Command:
        self.is_loaded = True
        if isinstance(self._command, ModuleNotFoundError):
            raise self._command
        return self._command


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeEntryPoint]:
    found = {
        "walk": FakeEntryPoint(
            "walk", click.Command("walk", callback=lambda: click.echo("walking"), help="Go on foot.")
        ),
        "fly": FakeEntryPoint("fly", ModuleNotFoundError("No module named 'wings'", name="wings")),
    }
    monkeypatch.setattr(cli, "entry_points", lambda *, group: list(found.values()))
    return found


def group() -> cli.EntryPointGroup:
    return cli.EntryPointGroup(name="everystop", entry_point_group="any")


def test_a_command_is_found_and_others_are_not_imported(entry_points: dict[str, FakeEntryPoint]) -> None:
    result = CliRunner().invoke(group(), ["walk"])
    assert result.output == "walking\n"
    assert entry_points["walk"].is_loaded
    assert not entry_points["fly"].is_loaded


def test_help_lists_commands_that_cannot_be_imported(entry_points: dict[str, FakeEntryPoint]) -> None:
    result = CliRunner().invoke(group(), ["--help"])
    assert result.exit_code == 0, result.output
    assert "Go on foot." in result.output
    assert "Not installed: needs wings." in result.output


def test_a_command_without_its_packages_says_what_to_install(
    entry_points: dict[str, FakeEntryPoint], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "cli", group())
    monkeypatch.setattr(sys, "argv", ["everystop", "fly", "--high", "away"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "'wings' is not installed; try: pip install 'everystop[all]'" in capsys.readouterr().err


def test_an_unknown_command_is_refused(entry_points: dict[str, FakeEntryPoint]) -> None:
    result = CliRunner().invoke(group(), ["swim"])
    assert result.exit_code == 2
    assert "swim" in result.output


def test_the_module_runs_the_command() -> None:
    command = [sys.executable, "-m", "everystop", "--version"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert finished.stdout == f"everystop {everystop.__version__}\n"


def test_all_commands_are_there() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "everystop", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    for name in ("bench", "chat", "executor", "generate", "scheduler", "serve", "status"):
        assert f"  {name} " in finished.stdout
    assert "Not installed" not in finished.stdout
