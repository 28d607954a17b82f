"""Stand in for the logits of a fused model, and for whatever else its forward would make of logits or labels."""

from typing import Any, NoReturn

from lit_fused.errors import UserError

_USES = (
    "getitem iter len float int bool array add radd sub rsub mul rmul truediv rtruediv matmul rmatmul pow neg abs "
    "lt le gt ge"
)


class NotComputedError(UserError, AttributeError):
    """Use of an entry that a fused model does not compute."""


class NotComputed:
    """Stands for an entry of a model's output that has no value in a fused pass: whatever uses it raises an error that
    says what to do. Libraries that look for tensors in an output pass it by."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}: not computed by a fused model>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotComputedError(
            f"a fused model computes its loss without logits, so that its output has no {self._name}; call the model "
            "without labels for its logits, or lit_fused.unfuse(model) before an evaluation that needs them"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Copies, pickles and libraries ask whether there is one.
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        next(value for value in given if isinstance(value, cls))._refuse()


for _use in _USES.split():
    setattr(NotComputed, f"__{_use}__", NotComputed._refuse)
