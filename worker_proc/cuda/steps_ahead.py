"""Steps whose tokens the device samples, launched before the last tokens are read."""

from collections.abc import Callable, Sequence

from torch import nn

from protocol.core_worker import ModelRunnerOutput
from worker_proc.attention.interface import AttentionBackend
from worker_proc.cuda.device_sampler import DeviceSampler, TokenCopy
from worker_proc.cuda.graphs import DecodeGraphs
from worker_proc.forward import compute_logits
from worker_proc.inputs import StepInputs
from worker_proc.parallel.device_group import DIFFERS, DeviceGroup
from worker_proc.parallel.exchange import RanksDiffer
from worker_proc.request import ScheduledRequest
from worker_proc.sampling.step_sampler import NOT_FINITE


class SampledStep:
    """A step whose tokens are sampled on the device, and reach the host later."""

    def __init__(
        self,
        step_id: int,
        parts: Sequence[ScheduledRequest],
        tokens: TokenCopy,
        end: Callable[[], tuple[int, int]],
    ) -> None:
        """`parts` are those that sample; their requests end in placeholders for the tokens."""
        self._step_id = step_id
        self._parts = parts
        self._tokens = tokens
        self._end = end
        self._output: ModelRunnerOutput | None = None

    @property
    def is_done(self) -> bool:
        return self._output is not None or self._tokens.is_done

    def finish(self) -> ModelRunnerOutput:
        """Wait for the tokens, and assign them to their requests."""
        if self._output is None:
            tokens = self._tokens.read()
            errors = {}
            for place, (part, token_id) in enumerate(zip(self._parts, tokens, strict=True)):
                if token_id == DIFFERS:
                    raise RanksDiffer("the ranks have sampled different tokens")
                if token_id < 0:
                    errors[part.request.req_id] = NOT_FINITE
                    tokens[place] = 0
                part.request.token_ids[part.end] = tokens[place]
            forward_ns, wait_ns = self._end()
            self._output = ModelRunnerOutput(
                self._step_id,
                tokens,
                forward_ns=forward_ns,
                request_errors=errors,
                wait_ns=wait_ns,
            )
        return self._output


class StepsAhead:
    """Launches steps that the device computes and samples without the host."""

    def __init__(
        self,
        model: nn.Module,
        backend: AttentionBackend,
        vocab_size: int,
        sampler: DeviceSampler,
        *,
        graphs: DecodeGraphs | None = None,
        group: DeviceGroup | None = None,
    ) -> None:
        """`graphs` compute the steps that have one of their sizes; `group` compares the ranks."""
        self._model = model
        self._backend = backend
        self._vocab_size = vocab_size
        self.sampler = sampler
        self.graphs = graphs
        self._group = group

    @staticmethod
    def can_compute(scheduled: Sequence[ScheduledRequest]) -> bool:
        """Return whether the device alone can compute a step and choose its tokens."""
        return bool(scheduled) and not any(part.request.needs_host for part in scheduled)

    def launch(
        self, step_id: int, inputs: StepInputs, end: Callable[[], tuple[int, int]]
    ) -> SampledStep:
        """Begin to compute a step; `end` measures it when its tokens are read."""
        if self.graphs is None or self.graphs.compute(inputs) is None:
            self.sampler.feed(inputs.input_ids)
            logits = compute_logits(self._model, self._backend, inputs, self._vocab_size)
            self.sampler.sample(logits, inputs)
        num_tokens = len(inputs.sampling)
        if self._group is not None:
            self._group.mark_differences(self.sampler.chosen[:num_tokens])
        return SampledStep(step_id, inputs.sampling, self.sampler.copy(num_tokens), end)
