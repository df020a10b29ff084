"""YAML to flags.

A config file is a mapping of named sections; a section maps flags' names in snake case to values.
The names of sections are free: they are for the reader. `include:` names files, relative to this
one, that are read first and overridden.

    include: base.yaml
    model:
      num_layers: 4
      swiglu: true
"""

import argparse
import difflib
from pathlib import Path
from typing import Any

import yaml

INCLUDE = "include"


class ConfigError(ValueError):
    """What is wrong with a config file: the file, the value, the rule and the way out."""


def read_config(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Flag name (snake case) -> value, with includes resolved; later files win.

    Raises:
        ConfigError: no such file, bad YAML, not a mapping of mappings, a key given twice, a circle.
    """
    path = path.resolve()
    if path in seen:
        circle = " -> ".join(p.name for p in (*seen, path))
        raise ConfigError(f"{path}: includes itself ({circle}); take one `include` out")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error}); save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: holds a {type(content).__name__}, not a mapping; write sections of "
            f"`flag_name: value` lines"
        )
    values: dict[str, Any] = {}
    for name in _names(path, content.get(INCLUDE)):
        values.update(read_config(path.parent / name, (*seen, path)))
    own: dict[str, Any] = {}
    for section, entries in content.items():
        if section == INCLUDE or entries is None:
            continue
        if not isinstance(entries, dict):
            raise ConfigError(
                f"{path}: `{section}: {entries}` stands outside any section; put it under one, "
                f"e.g. `training:`"
            )
        for key, value in entries.items():
            if key in own:
                raise ConfigError(f"{path}: {key} is given twice; keep one")
            own[key] = value
    return {**values, **own}


def to_flags(values: dict[str, Any], parser: argparse.ArgumentParser, source: str) -> list[str]:
    """The command line that the values stand for.

    Raises:
        ConfigError: a key that is no flag's name (with the nearest that is), or a value of the
            wrong kind for its flag.
    """
    actions = {
        option[2:].replace("-", "_"): (option, action)
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    flags: list[str] = []
    for key, value in values.items():
        if key not in actions:
            near = difflib.get_close_matches(str(key), actions, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise ConfigError(f"{source}: unknown key `{key}`{hint}")
        option, action = actions[key]
        flags += _flag(option, action, key, value, source)
    return flags


def _flag(option: str, action: argparse.Action, key: str, value: Any, source: str) -> list[str]:
    if value is None:
        return []
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise ConfigError(f"{source}: `{key}: {value}`: is a switch; write true or false")
        if value:
            return [option]
        if isinstance(action, argparse.BooleanOptionalAction):
            negative = option.startswith("--no-")
            return ["--" + option[5:] if negative else "--no-" + option[2:]]
        return []
    if isinstance(value, bool | dict):
        raise ConfigError(f"{source}: `{key}: {value}`: takes a value, not {value!r}")
    if isinstance(value, list):
        if action.nargs is None:
            raise ConfigError(f"{source}: `{key}: {value}`: takes one value, not a list")
        return [option, *(str(item) for item in value)]
    # One line of several values, "0.3 a 0.7 b": a name that holds blanks needs a YAML list.
    return [f"{option}={value}"] if action.nargs is None else [option, *str(value).split()]


def _names(path: Path, include: Any) -> list[str]:
    names = [] if include is None else include if isinstance(include, list) else [include]
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigError(f"{path}: `include: {include!r}`: must be a file name or a list of them")
    return names


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice or that is no name."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [
        key.value if key.tag.endswith(":merge") else loader.construct_object(key, deep=True)
        for key, _ in node.value
    ]
    for key in keys:
        if key == "<<":
            problem = "merge keys are not read; put what is shared in a file and `include:` it"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if not isinstance(key, str):
            problem = f"the key {key!r} is not a name"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if keys.count(key) > 1:
            raise yaml.MarkedYAMLError(problem=f"{key} twice", problem_mark=node.start_mark)
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True)
        for key, value in node.value
    }


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    """A whole number; YAML 1.1 reads 010 as 8 and 1:04 as 64, which nobody means."""
    text = str(node.value)
    digits = text.lstrip("+-")
    if ":" in text or (digits[0] == "0" and digits.strip("0_").isdigit()):
        problem = f"the number {text} could be meant in two ways; write it in decimal"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    number: int = loader.construct_yaml_int(node)
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
