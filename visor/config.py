"""YAML file + command-line overrides → a typed config.

A config is a pydantic model, possibly nested. `load_config` merges the file and the overrides, refuses
unknown keys by naming the nearest known one, and checks the values; `parse_cli` is the same for a command:
`--config run.yaml --optim.lr 1e-5 --tags='[a, b]'`. Training, evaluation and the `visor` command use it.
"""

from __future__ import annotations

import difflib
import sys
import types
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ModelT = TypeVar("ModelT", bound=BaseModel)
COMMAND_LINE = "command line"


class Config(BaseModel):
    """Base for configs: unknown fields refused, the docstring under a field is its description."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ConfigError(ValueError):
    """A config file or override that cannot be used; the message says what, where and what to do."""


def load_config(model_class: type[ModelT], path: str | Path | None, overrides: Sequence[str] = ()) -> ModelT:
    """Build `model_class` from the YAML file at `path` (None: defaults only) and command-line overrides.

    An override is `--key value`, `--key=value` or `--nested.key value`; a bool field may stand alone
    (`--flag`). Values are read as the field's type; lists and mappings are written as YAML. Raises
    ConfigError for an unreadable file, an unknown key (naming the nearest known one) or a bad value.
    """
    values = _read_yaml(Path(path)) if path is not None else {}
    file_name = str(path) if path is not None else "defaults"
    _refuse_unknown(model_class, values, "", file_name)
    overridden = []
    for key, raw in _split_overrides(model_class, overrides):
        keys, annotation = _resolve(model_class, key)
        value = _parse_value(raw, annotation)
        _refuse_unknown(annotation, value, ".".join(keys), COMMAND_LINE)
        _assign(values, keys, value)
        overridden.append(keys)
    try:
        return model_class.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_describe(error, model_class, file_name, overridden)) from None


def parse_cli(
    model_class: type[ModelT], argv: Sequence[str] | None = None, prog: str = "", description: str = ""
) -> ModelT:
    """Read a command line: `--config PATH`, overrides, `--help` (every field with default and description).

    `argv` excludes the program name; None = `sys.argv[1:]`. A mistake is printed without a traceback and
    exits with status 2, as argparse does.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    prog = prog or Path(sys.argv[0]).name
    if "-h" in arguments or "--help" in arguments:
        print(format_help(model_class, prog, description))
        raise SystemExit(0)
    try:
        path, overrides = _take_config_path(arguments)
        return load_config(model_class, path, overrides)
    except ConfigError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def format_help(model_class: type[BaseModel], prog: str, description: str = "") -> str:
    """The help text: one entry a field, nested ones dotted, with type, default and description."""
    lines = [f"usage: {prog} [--config PATH] [--key value ...]", ""]
    if description:
        lines += [description, ""]
    lines += ["  --config PATH", "      YAML file with any of the keys below; overrides win over it.", ""]
    for key, field, section in _flatten(model_class):
        needed = f" with {section}" if section and field.is_required() else ""
        lines.append(f"  --{key} {_type_name(field.annotation)}  ({_default_text(field)}{needed})")
        lines += [f"      {line}" for line in (field.description or "").splitlines()]
    return "\n".join(lines)


# ---------------------------------------------------------------- reading


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice; PyYAML would keep the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                line = key_node.start_mark.line + 1
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} twice, line {line}"
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: expected 'key: value' lines at the top level")
    return values


def _take_config_path(arguments: list[str]) -> tuple[str | None, list[str]]:
    path, rest, position = None, [], 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--config" or argument.startswith("--config="):
            if path is not None:
                raise ConfigError("--config is given twice; put everything into one file")
            _, equals, path = argument.partition("=")
            if not equals:
                position += 1
                path = arguments[position] if position < len(arguments) else ""
            if not path:
                raise ConfigError("--config needs a path")
        else:
            rest.append(argument)
        position += 1
    return path, rest


def _split_overrides(model_class: type[BaseModel], overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pair each `--key` with its value, as text."""
    position = 0
    while position < len(overrides):
        argument = overrides[position]
        if not argument.startswith("--") or len(argument) < 3:
            raise ConfigError(f"{COMMAND_LINE}: expected --key value, got {argument!r}")
        key, equals, raw = argument[2:].partition("=")
        position += 1
        if not equals:
            if position < len(overrides) and not overrides[position].startswith("--"):
                raw = overrides[position]
                position += 1
            elif bool in _leaves(_resolve(model_class, key)[1]):
                raw = "true"
            else:
                raise ConfigError(f"{COMMAND_LINE}: --{key} needs a value")
        yield key, raw


def _parse_value(raw: str, annotation: Any) -> Any:
    """Text stays text where only text is wanted (a name such as 1.0 or `on`); all else is read as YAML."""
    leaves = _leaves(annotation)
    if type(None) in leaves and raw.lower() in ("null", "~"):
        return None
    if all(_is_text(leaf) for leaf in leaves if leaf is not type(None)):
        return raw
    try:
        return yaml.load(raw, Loader=_UniqueKeyLoader)
    except yaml.YAMLError:
        return raw  # the type check below reports it with the field's name


def _assign(values: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[keys[-1]] = value


# ---------------------------------------------------------------- fields


def _leaves(annotation: Any) -> list[Any]:
    """The alternatives of an annotation: `int | None` → [int, NoneType]; Annotated is looked through."""
    if get_origin(annotation) is Annotated:
        return _leaves(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [leaf for argument in get_args(annotation) for leaf in _leaves(argument)]
    return [annotation]


def _is_text(leaf: Any) -> bool:
    if get_origin(leaf) is Literal:
        return all(isinstance(choice, str) for choice in get_args(leaf))
    return isinstance(leaf, type) and (
        leaf is str or issubclass(leaf, Path) or (issubclass(leaf, Enum) and issubclass(leaf, str))
    )


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    """The model of a nested field, when there is exactly one candidate."""
    models = [x for x in _leaves(annotation) if isinstance(x, type) and issubclass(x, BaseModel)]
    return models[0] if len(models) == 1 else None


def _resolve(model_class: type[BaseModel], key: str) -> tuple[list[str], Any]:
    """Follow a dotted key through the nested models; return its parts and the field's annotation."""
    keys: list[str] = []
    annotation: Any = model_class
    for part in key.split("."):
        model = _nested_model(annotation)
        if model is None:
            free = [leaf for leaf in _leaves(annotation) if leaf is dict or get_origin(leaf) is dict]
            if not free:
                raise ConfigError(f"{COMMAND_LINE}: --{key}: {'.'.join(keys)} has no keys below it")
            annotation = (get_args(free[0]) or (str, Any))[1]
        else:
            name = part if part in model.model_fields else part.replace("-", "_")
            if name not in model.model_fields:
                raise ConfigError(_unknown(".".join([*keys, part]), model, COMMAND_LINE))
            part, annotation = name, model.model_fields[name].annotation
        keys.append(part)
    return keys, annotation


def _refuse_unknown(annotation: Any, values: Any, prefix: str, source: str) -> None:
    """Look for unknown keys at every level, in nested models and in lists and mappings of models."""
    for leaf in _leaves(annotation):
        arguments = get_args(leaf)
        if isinstance(values, list) and get_origin(leaf) is list and arguments:
            for index, item in enumerate(values):
                _refuse_unknown(arguments[0], item, f"{prefix}.{index}", source)
        elif isinstance(values, dict) and get_origin(leaf) is dict and arguments:
            for key, item in values.items():
                _refuse_unknown(arguments[1], item, f"{prefix}.{key}", source)
    model = _nested_model(annotation)
    if model is None or not isinstance(values, dict):
        return
    for key, value in values.items():
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if key not in model.model_fields:
            raise ConfigError(_unknown(dotted, model, source))
        _refuse_unknown(model.model_fields[key].annotation, value, dotted, source)


def _unknown(dotted: str, model: type[BaseModel], source: str) -> str:
    prefix, _, name = dotted.rpartition(".")
    near = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.0)
    known = f"{prefix}.{near[0]}" if prefix and near else "".join(near)
    return f"{source}: unknown key {dotted!r}" + (f"; did you mean {known!r}?" if known else "")


def _flatten(
    model_class: type[BaseModel], prefix: str = "", section: str = ""
) -> Iterator[tuple[str, FieldInfo, str]]:
    """Every field with its dotted key and the innermost section around it that may be left out ("": none)."""
    for name, field in model_class.model_fields.items():
        nested = _nested_model(field.annotation)
        if nested is not None:
            optional = type(None) in _leaves(field.annotation)
            yield from _flatten(nested, f"{prefix}{name}.", f"{prefix}{name}" if optional else section)
        else:
            yield f"{prefix}{name}", field, section


# ---------------------------------------------------------------- messages


def _type_name(annotation: Any) -> str:
    leaves = _leaves(annotation)
    if len(leaves) > 1:
        return " or ".join(_type_name(leaf) for leaf in leaves)
    leaf = leaves[0]
    if leaf is type(None):
        return "null"
    if get_origin(leaf) is Literal:
        return "|".join(map(str, get_args(leaf)))
    return (
        leaf.__name__ if isinstance(leaf, type) and not get_args(leaf) else str(leaf).replace("typing.", "")
    )


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    assert default is not PydanticUndefined
    return f"default: {'null' if default is None else default}"


def _describe(
    error: ValidationError, model_class: type[BaseModel], file_name: str, overridden: list[list[str]]
) -> str:
    """One line a bad value: where it was given, the key, the value, the expected type."""
    lines = []
    for problem in error.errors(include_url=False):
        location = [str(part) for part in problem["loc"]]
        source = COMMAND_LINE if any(location[: len(k)] == k for k in overridden) else file_name
        name, expected = _expected(model_class, location)
        if problem["type"] == "missing":
            lines.append(f"{source}: {name} is required (expected {expected})")
            continue
        reason = problem["msg"].removeprefix("Value error, ")
        given = f" = {problem['input']!r}" if name else ""
        lines.append(f"{source}: {name}{given}: {reason}" + (f" (expected {expected})" if name else ""))
    return "\n".join(lines)


def _expected(model_class: type[BaseModel], location: list[str]) -> tuple[str, str]:
    """The dotted name and the type of the deepest field on the way to `location`."""
    annotation: Any = model_class
    keys = []
    for part in location:
        model = _nested_model(annotation)
        if model is None or part not in model.model_fields:
            break
        keys.append(part)
        annotation = model.model_fields[part].annotation
    return ".".join(keys), _type_name(annotation)
