"""The sources of weights for models that were built without memory."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from lit_fused.weights.rules import InitialWeights, named_tensors
from lit_fused.weights.shards import Index

SOURCE = "_lit_fused_weights"  # the attribute of a model without memory that holds its WeightSource


class WeightSource(ABC):
    """Gives the tensors of a model by name.

    Args:
        skeleton: the whole model on the meta device, its tied weights not tied.
        tied: the names of tied weights -> the name of the one that they are tied to.
        seed: seed of the tensors that are drawn.
    """

    def __init__(self, skeleton: PreTrainedModel, tied: Mapping[str, str], seed: int) -> None:
        self.name = type(skeleton).__name__
        self.shapes = {name: tensor.shape for name, tensor in named_tensors(skeleton)}
        self.tied = dict(tied)
        self.initial = InitialWeights(skeleton, seed)

    def read(self, name: str, index: Index) -> Tensor:
        """Return a part of a tensor, on the CPU, to be copied at once. Tied weights give the same numbers."""
        return self._read(self.tied.get(name, name), index)

    def close(self) -> None:
        """Free memory. Reading may continue later."""
        self.initial.close()

    @abstractmethod
    def _read(self, name: str, index: Index) -> Tensor: ...


class FromRules(WeightSource):
    """Draws random weights by the model's own rules."""

    def _read(self, name: str, index: Index) -> Tensor:
        return self.initial.draw(name)[index]
