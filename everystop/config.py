"""From flags, environment and a TOML file to one frozen configuration; the first of them that has a value wins.

A setting `max_num_seqs` of the executor is the flag `--max-num-seqs`, the variable `EVERYSTOP_EXECUTOR_MAX_NUM_SEQS`,
and the key `max_num_seqs` in the section `[executor]` of the file that `--config` names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from everystop.options import ConfigError, Setting, settings
from everystop.settings import SECTIONS, ServiceConfig

CONFIG_ENVVAR = "EVERYSTOP_CONFIG"

_FILE = "everystop.config.file"  # where the context keeps the path

Config = TypeVar("Config", bound=ServiceConfig)


def config_command(
    section: str,
    config_type: type[Config],
    *,
    help: str,  # noqa: A002  # named as in click
) -> Callable[[Callable[[Config], None]], click.Command]:
    """Turn a function of a configuration into a command that has all its settings as options."""

    def decorate(run: Callable[[Config], None]) -> click.Command:
        def callback(**values: Any) -> None:
            run(build(section, config_type, values))

        return click.Command(section, callback=callback, params=[config_option(), *options(section)], help=help)

    return decorate


def options(
    section: str, flags: Mapping[str, str] | None = None, without: Collection[str] = ()
) -> list[click.Parameter]:
    """The options of a section, for a command that `build`s its configuration.

    Args:
        section: a key of `SECTIONS`.
        flags: flags by setting, for those that are not called like their setting.
        without: settings that the command chooses by itself.

    """
    flags = flags or {}
    return [
        _SettingOption(section, setting, flags.get(setting.name, setting.flag))
        for setting in settings(SECTIONS[section])
        if setting.name not in without
    ]


def config_option() -> click.Parameter:
    """`--config`: reads the file before other options look for their defaults."""
    return click.Option(
        ["--config"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar=CONFIG_ENVVAR,
        show_envvar=True,
        is_eager=True,
        expose_value=False,
        callback=_use_file,
        help="TOML file of settings, with a section for each service.",
    )


def build(section: str, config_type: type[Config], values: Mapping[str, Any], **chosen: Any) -> Config:
    """The configuration from the values of a command's options.

    Args:
        section: whose options to take.
        config_type: the class of the section.
        values: what click passes to the command; options of other sections are left alone.
        chosen: settings that the command chooses by itself.

    Raises:
        click.UsageError: when settings are at odds with each other.

    """
    given = {
        setting.name: values[key] for setting in settings(config_type) if (key := _key(section, setting.name)) in values
    }
    try:
        return config_type(**(given | chosen))
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def to_flags(config: ServiceConfig) -> list[str]:
    """The command-line flags that make `config_command` build an equal configuration."""
    values = {setting.flag: getattr(config, setting.name) for setting in settings(type(config))}
    return [f"{flag}={value}" for flag, value in values.items() if value is not None]


def _key(section: str, name: str) -> str:
    return f"{section}_{name}"


class _SettingOption(click.Option):
    """An option whose errors say what is allowed and, for a value out of the file, where it stands."""

    def __init__(self, section: str, setting: Setting, flag: str) -> None:
        self._section = section
        self._setting = setting
        super().__init__(
            [flag, _key(section, setting.name)],
            type=_click_type(setting),
            default=setting.default,
            help=setting.help,
            envvar=f"EVERYSTOP_{section}_{setting.name}".upper(),
            show_default=setting.default not in (None, ""),
            show_envvar=True,
        )

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            converted = super().type_cast_value(ctx, value)
        except click.BadParameter as error:
            raise self._refusal(ctx, value) from error
        if not self._setting.accepts(converted):  # NaN, which click's ranges let pass
            raise self._refusal(ctx, value)
        return converted

    def _refusal(self, ctx: click.Context, value: Any) -> click.BadParameter:
        assert self.name is not None
        from_file = ctx.get_parameter_source(self.name) is ParameterSource.DEFAULT_MAP
        place = f" in [{self._section}] of {ctx.meta[_FILE]}" if from_file else ""
        return click.BadParameter(f"{value!r}{place} is not allowed (allowed: {self._setting.allowed})", ctx, self)


def _click_type(setting: Setting) -> click.ParamType[Any]:
    if setting.choices:
        return click.Choice(setting.choices)
    if setting.value_type is str:
        return click.STRING
    # Both take either kind of number; the stubs want the very one.
    low: Any = setting.min
    high: Any = setting.max
    return click.IntRange(low, high) if setting.value_type is int else click.FloatRange(low, high)


def _use_file(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    if path is not None:
        context.meta[_FILE] = path
        context.default_map = read_file(path)


def read_file(path: Path) -> dict[str, str]:
    """Settings in a TOML file, each as its option expects it from a command line.

    Raises:
        click.UsageError: no TOML, an unknown section or key, or a value of the wrong type.

    """
    try:
        sections = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"{path}: {error}") from error
    values: dict[str, str] = {}
    for section, keys in sections.items():
        if section not in SECTIONS or not isinstance(keys, dict):
            raise click.UsageError(f"{path}: [{section}] is not a section (sections: {', '.join(SECTIONS)})")
        known = {setting.name: setting for setting in settings(SECTIONS[section])}
        for name, value in keys.items():
            if name not in known:
                raise click.UsageError(f"{path}: [{section}] has no setting {name!r} (settings: {', '.join(known)})")
            values[_key(section, name)] = _text(f"{path}: [{section}] {name}", known[name], value)
    return values


def _text(place: str, setting: Setting, value: object) -> str:
    # As text, so that 1.5 or true is no integer: click would round them.
    expected = str if setting.value_type is str else int | float
    if not isinstance(value, expected) or isinstance(value, bool):
        raise click.UsageError(f"{place} ({setting.flag}): {value!r} is not allowed (allowed: {setting.allowed})")
    return str(value)
