"""How a setting is declared: one dataclass field says its default, meaning and range, once."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from types import NoneType
from typing import Any


class ConfigError(ValueError):
    """A setting is out of its range, or at odds with another one. The message names the flags."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a configuration, as declared by `option`."""

    name: str
    value_type: type[int] | type[float] | type[str]
    default: int | float | str | None
    """None: left to the service."""
    help: str
    min: int | float | None
    """Every number has both bounds."""
    max: int | float | None
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.value_type is str:
            return "any text"
        return f"{self.min} to {self.max}"

    def accepts(self, value: int | float | str | None) -> bool:
        """Whether `value` is in the range."""
        if value is None:
            return self.default is None
        if isinstance(value, str):
            return not self.choices or value in self.choices
        assert self.min is not None
        assert self.max is not None
        return self.min <= value <= self.max  # false for NaN


def option(
    default: Any,
    *,
    help: str,  # noqa: A002  # named as in click
    min: float | None = None,  # noqa: A002
    max: float | None = None,  # noqa: A002
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is a setting.

    Args:
        default: what it is when nothing says otherwise; None leaves it to the service.
        help: what it means, and its unit.
        min: the least number.
        max: the largest number.
        choices: the only texts allowed, if not any.

    """
    return dataclasses.field(default=default, metadata={"help": help, "min": min, "max": max, "choices": choices})


def settings(config_type: type[Any]) -> list[Setting]:
    """The settings of a configuration class, in the order of their declaration."""
    hints = typing.get_type_hints(config_type)
    found = []
    for field in dataclasses.fields(config_type):
        hint = hints[field.name]
        (value_type,) = set(typing.get_args(hint) or (hint,)) - {NoneType}
        default: Any = field.default
        found.append(Setting(name=field.name, value_type=value_type, default=default, **field.metadata))
    return found


def check(config: Any) -> None:
    """Raise `ConfigError` for the first setting of `config` that is out of its range."""
    for setting in settings(type(config)):
        value = getattr(config, setting.name)
        if not setting.accepts(value):
            raise ConfigError(f"{setting.flag}: {value!r} is not allowed (allowed: {setting.allowed})")
