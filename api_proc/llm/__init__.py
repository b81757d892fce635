"""The Python interface: text generation without HTTP, with the names of vLLM's classes.

from api_proc.llm import LLM, SamplingParams

with LLM("demo") as llm:
    for output in llm.generate(["def add(a, b):"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from api_proc.bodies import RepetitionDetection as RepetitionDetectionParams
from api_proc.generation.structured import StructuredOutputs as StructuredOutputsParams
from api_proc.llm.async_llm import AsyncLLM
from api_proc.llm.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from api_proc.llm.llm import LLM
from api_proc.llm.lora import LoRARequest
from api_proc.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from api_proc.llm.prompt_lists import PromptsFailed
from api_proc.llm.sampling import RequestOutputKind, SamplingParams
from protocol.sampling import Pooling, PoolingType

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "Pooling",
    "PoolingOutput",
    "PoolingRequestOutput",
    "PoolingType",
    "PromptsFailed",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]
