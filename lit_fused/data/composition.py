"""Build a data module from a source, an encoding, and one flat set of options, as files of ``conf/data`` have them."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from lit_fused.data.encoding import Encoding
from lit_fused.data.source import Source
from lit_fused.data.token_arrays import TokenArrays
from lit_fused.data.token_data_module import TokenDataModule
from lit_fused.errors import UserError


def compose_data(
    read: Callable[..., Source | TokenArrays],
    encode: Callable[..., Encoding] | Mapping[str, Callable[..., Encoding]] | None = None,
    format: str | None = None,
    **options: Any,
) -> TokenDataModule:
    """Build the source, the encoding and the data module, handing each option to all of them that name it.

    ``compose_data(FileSource, TextEncoding, path="corpus", block_size=512)`` is
    ``TokenDataModule(FileSource("corpus"), TextEncoding(), block_size=512)``.

    Args:
        read: The class of the source, or a function that builds it.
        encode: The class of the encoding; or several by name, of which ``format`` chooses one; None for token arrays.
        format: The name of the encoding, where there are several.
        options: Those of the source, of the encoding, and of the data module.

    Raises:
        UserError: There is no such format or option, or the option is for other formats.
    """
    if isinstance(encode, Mapping):
        if format is None or format not in encode:
            *names, last = encode
            raise UserError(f"data.format must be {', '.join(names)} or {last}; got {format!r}")
        others = {name: signature(part).parameters for name, part in encode.items()}
        encode = encode[format]
    else:
        others = {}
    parts = [part for part in (read, encode, TokenDataModule) if part is not None]
    takes = {part: set(signature(part).parameters) for part in parts}
    takes[TokenDataModule] -= {"source", "encoding"}
    for name in options.keys() - set().union(*takes.values()):
        owners = {key: parameters[name] for key, parameters in others.items() if name in parameters}
        if not owners:
            raise UserError(f"data.{name} is unknown; {', '.join(map(_name, parts))} do not take it")
        if (options[name] or None) != next(iter(owners.values())).default:  # it would have no effect
            raise UserError(f"data.{name} is for data.format={' or '.join(owners)}, but data.format is {format}")
    chosen = {part: {name: options[name] for name in names if name in options} for part, names in takes.items()}
    encoding = None if encode is None else encode(**chosen[encode])
    return TokenDataModule(read(**chosen[read]), encoding, **chosen[TokenDataModule])


def _name(part: Callable[..., Any]) -> str:
    return getattr(part, "func", part).__name__  # Hydra gives classes as partials
