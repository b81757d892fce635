"""A model with its weights: the result of a load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from protocol.sampling import PoolingType
from worker_proc.attention.probed_layer import ProbedLayer, are_causal
from worker_proc.loading.model_kind import ModelKind
from worker_proc.loading.pooling_model import PoolingModel
from worker_proc.quantization.report import CodesReport
from worker_proc.recurrent.state_spec import RecurrentSpec
from worker_proc.sampling.heads import Head


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and facts from its configuration."""

    model: PreTrainedModel | PoolingModel
    layers: list[ProbedLayer]  # attention layers, in call order
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    model_len: int  # longest context that the model can compute
    eos_token_ids: list[int]
    recurrent: list[RecurrentSpec] = field(default_factory=list)
    """Modules with a recurrent state, in call order."""
    codes: CodesReport | None = None
    """Records how the weights of a quantized checkpoint are stored; None: it is not quantized."""
    kind: ModelKind = ModelKind.GENERATES
    pooling: PoolingType = PoolingType.LAST
    """The pooling of a classification head, or of requests that do not choose one."""
    head: Head | None = None
    """The module applied after pooling."""
    has_own_attention: bool = False
    """True if the model's own code computes attention, and still has to be replaced."""
    has_token_types: bool = False
    """True if the two texts of a pair have different token types."""
    has_attention: bool = True
    """True if the model has attention layers; a pipeline stage may have none."""
    has_states: bool = False
    """True if the model has modules with a recurrent state; a pipeline stage may have none."""
    row_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The row shapes that modules with 2-D matrices take, by name, without the text dimensions."""
    argument_shapes: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    """The argument shapes of modules with 3-D matrices, by name; 0 stands for the number of
    rows."""
    summed: Sequence[str] = ()
    """Names of the modules whose outputs the ranks sum, if several ranks divide the model."""

    @property
    def is_causal(self) -> bool:
        """True if a token attends to preceding ones only; False: a text is computed at once."""
        return are_causal(self.layers)
