from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from everystop.config import config_command, read_file, to_flags
from everystop.options import ConfigError, settings
from everystop.settings import SECTIONS, ExecutorConfig, SchedulerConfig


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[Result, list[ExecutorConfig]]:
    built: list[ExecutorConfig] = []
    command = config_command("executor", ExecutorConfig, help="Run it.")(built.append)
    return CliRunner().invoke(command, arguments, env=env), built


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "everystop.toml"


def test_the_defaults_are_those_of_the_class() -> None:
    result, built = run()
    assert result.exit_code == 0, result.output
    assert built == [ExecutorConfig()]


def test_flag_goes_before_environment_before_file_before_default(toml: Path) -> None:
    toml.write_text("[executor]\nmax_num_seqs = 11\nthreads = 12\nblock_size = 13\n")
    env = {"EVERYSTOP_EXECUTOR_MAX_NUM_SEQS": "21", "EVERYSTOP_EXECUTOR_THREADS": "22"}
    result, (config,) = run("--config", str(toml), "--max-num-seqs", "31", env=env)
    assert result.exit_code == 0, result.output
    assert (config.max_num_seqs, config.threads, config.block_size) == (31, 22, 13)
    assert config.max_num_batched_tokens == ExecutorConfig().max_num_batched_tokens


def test_the_environment_names_the_file(toml: Path) -> None:
    toml.write_text('[executor]\nmodel = "folder"\n')
    _, (config,) = run(env={"EVERYSTOP_CONFIG": str(toml)})
    assert config.model == "folder"


def test_sections_of_other_services_are_left_alone(toml: Path) -> None:
    toml.write_text("[scheduler]\nmax_num_seqs = 11\n[executor]\nthreads = 3\n")
    _, (config,) = run("--config", str(toml))
    assert (config.max_num_seqs, config.threads) == (ExecutorConfig().max_num_seqs, 3)


def test_file_numbers_keep_their_type(toml: Path) -> None:
    toml.write_text("[executor]\nkv_cache_gib = 2\nmock_step_ms = 0.25\n")
    _, (config,) = run("--config", str(toml))
    assert (config.kv_cache_gib, config.mock_step_ms) == (2.0, 0.25)
    assert isinstance(config.kv_cache_gib, float)


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--max-num-seqs", "0", "1 to 65536"),
        ("--max-num-seqs", "many", "1 to 65536"),
        ("--max-num-seqs", "1.5", "1 to 65536"),
        ("--num-blocks", "-1", "1 to 16777216"),
        ("--mock-eos-rate", "1.01", "0.0 to 1.0"),
        ("--kv-cache-gib", "nan", "0.001 to 65536.0"),
        ("--kv-cache-gib", "inf", "0.001 to 65536.0"),
        ("--backend", "tpu", "auto, cpu, mock"),
    ],
)
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_wrong_value_names_flag_and_range(flag: str, value: str, allowed: str, source: str, toml: Path) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    if source == "flag":
        result, built = run(f"{flag}={value}")
    elif source == "environment":
        result, built = run(env={f"EVERYSTOP_EXECUTOR_{name.upper()}": value})
    else:
        quoted = f'"{value}"' if value in ("many", "tpu") else value
        toml.write_text(f"[executor]\n{name} = {quoted}\n")
        result, built = run("--config", str(toml))
        assert toml.name in result.output
    assert result.exit_code == 2
    assert built == []
    assert flag in result.output
    assert allowed in result.output
    assert value in result.output


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[executor]\nmax_num_seq = 1\n", "max_num_seq"),
        ("[exekutor]\n", "exekutor"),
        ("max_num_seqs = 1\n", "max_num_seqs"),
        ("[executor]\nthreads = true\n", "--threads"),
        ("[executor]\nthreads = [1]\n", "--threads"),
        ("[executor]\nmodel = 7\n", "--model"),
        ("[executor\n", "line 1"),
    ],
)
def test_a_wrong_file_names_the_place(content: str, expected: str, toml: Path) -> None:
    toml.write_text(content)
    result, built = run("--config", str(toml))
    assert result.exit_code == 2
    assert built == []
    assert expected in result.output
    assert toml.name in result.output


def test_a_file_that_is_not_text_is_refused(toml: Path) -> None:
    toml.write_bytes(b"\xff\xfe")
    with pytest.raises(click.UsageError, match=toml.name):
        read_file(toml)


def test_settings_at_odds_name_both_flags() -> None:
    result, built = run("--max-num-batched-tokens", "8", "--max-num-seqs", "9")
    assert result.exit_code == 2
    assert built == []
    assert "--max-num-batched-tokens (8)" in result.output
    assert "--max-num-seqs (9)" in result.output


def test_the_class_checks_itself() -> None:
    with pytest.raises(ConfigError, match=r"--watermark.*0\.0 to 0\.9"):
        SchedulerConfig(watermark=0.95)
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        ExecutorConfig(max_num_seqs=0)
    with pytest.raises(ConfigError, match="--batching"):
        SchedulerConfig(batching="dynamic")


@pytest.mark.parametrize(
    "listen", ["50051", ":50051", "localhost", "localhost:", "localhost:x", "h:65536", "::1:50051"]
)
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        SchedulerConfig(listen=listen)


@pytest.mark.parametrize("listen", ["localhost:0", "0.0.0.0:65535", "[::1]:50051"])
def test_addresses_are_accepted(listen: str) -> None:
    assert SchedulerConfig(listen=listen).listen == listen


def test_help_shows_every_setting_with_its_environment_variable() -> None:
    result, _ = run("--help")
    words = "".join(result.output.split())
    for setting in settings(ExecutorConfig):
        assert setting.flag in words
        assert f"EVERYSTOP_EXECUTOR_{setting.name.upper()}" in words


def test_flags_build_an_equal_configuration() -> None:
    config = ExecutorConfig(backend="mock", num_blocks=7, kv_cache_gib=0.1, model="a b", mock_fail="die@1", threads=2)
    _, built = run(*to_flags(config))
    assert built == [config]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_says_what_it_means_and_is_in_range(section: str) -> None:
    for setting in settings(SECTIONS[section]):
        assert setting.help.endswith(".")
        assert setting.accepts(setting.default)
        assert setting.value_type is str or None not in (setting.min, setting.max)
