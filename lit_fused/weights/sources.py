"""Where the weights of a model come from that has been built without memory."""

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
        seed: for the tensors that are drawn.
    """

    def __init__(self, skeleton: PreTrainedModel, tied: Mapping[str, str], seed: int) -> None:
        self.name = type(skeleton).__name__
        self.shapes = {name: tensor.shape for name, tensor in named_tensors(skeleton)}
        self.tied = dict(tied)
        self.initial = InitialWeights(skeleton, seed)

    def read(self, name: str, index: Index) -> Tensor:
        """A part of a tensor, on the CPU, to be copied from; of a tied weight that of the one it is tied to."""
        return self._read(self.tied.get(name, name), index)

    def close(self) -> None:
        """All has been read that is needed for now."""
        self.initial.close()

    @abstractmethod
    def _read(self, name: str, index: Index) -> Tensor: ...


class FromRules(WeightSource):
    """Random weights, by the model's own rules."""

    def _read(self, name: str, index: Index) -> Tensor:
        return self.initial.draw(name)[index]
