"""How long a step takes: a linear model, fitted to steps that were measured.

    python -m tests.simulation.scale.costs --model DIR

measures steps of an engine in this process, and prints the coefficients and their error.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from scripts.bench.commands.steps import SteppedEngine
from scripts.bench.workloads import Request

_NUM_STEPS = 12
_WARM_UP = 3


class StepCosts(NamedTuple):
    """Milliseconds of a step."""

    step_ms: float
    """The time of any step."""
    decoded_ms: float
    """The time for each request that decodes."""
    prompt_ms: float
    """The time for each prompt token."""
    context_ms: float
    """The time for each thousand tokens of context of all requests together."""

    def seconds(self, num_decoded: int, num_prompt: int, num_context: int) -> float:
        step_ms, decoded_ms, prompt_ms, context_ms = self
        milliseconds = (
            step_ms
            + decoded_ms * num_decoded
            + prompt_ms * num_prompt
            + context_ms * num_context / 1000
        )
        return milliseconds / 1000


MEASURED = StepCosts(7.3, 0.66, 0.65, 0.71)
"""The 135M shape in bfloat16 on two cores of an AMD EPYC (Zen 4); mean error 10 %."""


class Sample(NamedTuple):
    """A measured step."""

    num_decoded: int
    num_prompt: int
    num_context: int
    ms: float


def fit(samples: Sequence[Sample]) -> tuple[StepCosts, float]:
    """Return the costs with the least relative error, and the mean of that error."""
    import numpy

    rows = [(1.0, s.num_decoded, s.num_prompt, s.num_context / 1000) for s in samples]
    weights = [1 / sample.ms for sample in samples]
    matrix = numpy.array(rows) * numpy.array(weights)[:, None]
    found = numpy.linalg.lstsq(matrix, numpy.ones(len(samples)), rcond=None)[0]
    costs = StepCosts(*(max(0.0, float(value)) for value in found))
    errors = [
        abs(costs.seconds(s.num_decoded, s.num_prompt, s.num_context) * 1000 / s.ms - 1)
        for s in samples
    ]
    return costs, statistics.mean(errors)


def measure(model: str) -> list[Sample]:
    """Measure steps that decode, and steps that compute prompts."""
    flags = ["--max-model-len", "4096", "--max-num-seqs", "128", "--max-num-batched-tokens", "4096"]
    engine = SteppedEngine(model, flags, time.perf_counter_ns)
    random = Random(0)

    def submit(length: int, num_tokens: int) -> int:
        prompt = [random.randrange(5, 1000) for _ in range(length)]
        return engine.submit(Request(prompt, num_tokens))

    def step_ms() -> float:
        began = time.perf_counter()
        engine.step()
        return (time.perf_counter() - began) * 1000

    samples = []
    for length in (32, 64, 128, 256, 512, 1024, 2048):
        for _ in range(3):
            request_id = submit(length, 2)
            samples.append(Sample(0, length, length, step_ms()))
            engine.cancel([request_id])
            engine.step()
    for count in (1, 4, 16, 64):
        for length in (64, 512):
            request_ids = [submit(length, 200) for _ in range(count)]
            while engine.num_running < count:
                engine.step()
            for _ in range(_WARM_UP):
                engine.step()
            times = [step_ms() for _ in range(_NUM_STEPS)]
            samples.append(Sample(count, 0, count * length, statistics.median(times)))
            engine.cancel(request_ids)
            engine.step()
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="checkpoint to measure")
    samples = measure(parser.parse_args(argv).model)
    for sample in samples:
        print(sample)
    costs, error = fit(samples)
    print(costs, f"mean error {error:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
