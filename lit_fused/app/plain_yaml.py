"""Check YAML from a stranger before it is built: a few hundred bytes of it can stand for more than any memory holds."""

import yaml

_DEEPEST = 100  # levels; configurations have about ten, and some thousands end the process inside of libyaml


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
