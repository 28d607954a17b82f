"""Check YAML from a stranger before it is built: a few hundred bytes of it can stand for more than any memory holds."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

_DEEPEST = 100  # levels; configurations have about ten, and some thousands end the process inside of libyaml
_LONGER = 10  # times as long as the file; a run's own configuration stands for about twice what it has written
_NAMING = {"oc.select", "oc.dict.values", "oc.dict.keys"}  # resolvers whose first argument is another entry


def plain_yaml(text: str) -> str:
    """Return the text; raise ``yaml.YAMLError`` if an alias (``*name``) in it repeats another part, which may repeat
    others in turn, or if it is nested too deeply to be built."""
    depth = 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"it repeats a part of itself by an alias, *{event.anchor}, which no run writes")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise yaml.YAMLError(f"it is nested more than {_DEEPEST} levels deep")
    return text


def check_length(content: Any, written: int) -> None:
    """Raise ``yaml.YAMLError`` if the interpolations of a configuration stand for far more than the ``written``
    characters of its file (``b: ${a}${a}``, ``c: ${b}${b}`` and so on), or for themselves. Nothing is resolved."""
    lengths: dict[tuple[str, ...], int] = {}
    open_places: set[tuple[str, ...]] = set()

    def length(value: Any, place: tuple[str, ...]) -> int:
        if place in lengths:
            return lengths[place]
        if place in open_places or len(open_places) > _DEEPEST:
            raise yaml.YAMLError(f"{'.'.join(place)} is an interpolation of itself, or of too many others in turn")
        open_places.add(place)
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            found = sum(1 + length(inner, (*place, str(key))) for key, inner in items)
        else:
            others = _named_in(value, place) if isinstance(value, str) else []
            found = len(str(value)) + sum(length(_at(content, other), other) for other in others)
        open_places.remove(place)
        lengths[place] = found
        return found

    if length(content, ()) > _LONGER * (written + 1000):
        raise yaml.YAMLError(f"its interpolations stand for more than {_LONGER} times what it has written")


def _named_in(text: str, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the places that the interpolations in a text at a place name."""
    for part in text.split("${")[1:]:
        resolver, colon, arguments = part.partition("}")[0].partition(":")
        if resolver.strip() not in _NAMING if colon else "}" not in part:
            continue  # ``trusted.py`` refuses a name that is made of other interpolations.
        name = (arguments.partition(",")[0] if colon else resolver).strip().strip("'\"")
        if not re.fullmatch(r"[\w.\[\]-]+", name):
            raise yaml.YAMLError(f"the interpolation ${{{' '.join(part[:40].split())} has no plain name")
        inner = name.lstrip(".")
        dots = len(name) - len(inner)
        yield (*place[: len(place) - dots if dots else 0], *filter(None, re.split(r"[.\[\]]", inner)))


def _at(content: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        if isinstance(content, list) and key.isdigit() and int(key) < len(content):
            content = content[int(key)]
        else:
            content = next((v for k, v in content.items() if str(k) == key), "") if isinstance(content, dict) else ""
    return content
