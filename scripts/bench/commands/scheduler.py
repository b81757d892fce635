"""`scheduler`: the scheduler alone, beside figures of vLLM on a machine of the same size."""

import argparse
import sys
from collections.abc import Sequence

import msgspec

from scripts.bench.scheduler_costs import (
    ADMITTED_TOKENS,
    PROMPT_TOKENS,
    measure_admissions,
    measure_departure,
    measure_front_cost,
    measure_marks,
    measure_steady_decode,
    measure_waiting_cost,
    measure_waiting_memory,
)
from scripts.bench.scheduler_figures import (
    BLOCK_SIZE,
    Admission,
    Departure,
    FrontCost,
    MarksCost,
    Plan,
    SteadyDecode,
    WaitingCost,
    WaitingMemory,
)

_FLAG_TEXTS = {
    "running": "running requests of the steady decode",
    "waiting_behind": "running requests in front of those that wait",
    "waiting": "waiting requests",
    "leaving": "running requests of the client that disconnects",
    "admissions": "admissions in each repetition",
    "steps": f"steps in each repetition, a multiple of {BLOCK_SIZE}",
    "repeats": "repetitions",
    "steps_in_flight": "steps that are sent before the first returns",
}


class Report(msgspec.Struct, frozen=True):
    """All that was measured."""

    plan: Plan
    python: str
    block_size: int
    prompt_tokens: int
    admitted_tokens: int
    steady_decode: list[SteadyDecode]
    admission: list[Admission]
    marks: list[MarksCost]
    waiting_cost: WaitingCost
    front_cost: list[FrontCost]
    departure: Departure
    waiting_memory: WaitingMemory


def measure(plan: Plan) -> Report:
    """Run all measurements of a plan."""
    return Report(
        plan=plan,
        python=sys.version.split()[0],
        block_size=BLOCK_SIZE,
        prompt_tokens=PROMPT_TOKENS,
        admitted_tokens=ADMITTED_TOKENS,
        steady_decode=[measure_steady_decode(count, plan) for count in plan.running],
        admission=measure_admissions(plan),
        marks=[measure_marks(count, plan) for count in plan.running],
        waiting_cost=measure_waiting_cost(plan),
        front_cost=measure_front_cost(plan),
        departure=measure_departure(plan),
        waiting_memory=measure_waiting_memory(plan),
    )


def _against_vllm(ours_us: float, vllm_us: float | None) -> str:
    return f"{'-':>9} {'-':>8}" if vllm_us is None else f"{vllm_us:9.0f} {vllm_us / ours_us:7.1f}x"


_HEADS = """\
Steady decode, us per step
    running  schedule    update     total      vLLM    ratio
{steady}

Admission of a prompt of {tokens} tokens, us; its creation is not in the total
       case    create       add  schedule    update     total      vLLM    ratio
{admission}

Marks of the requests in flight, us per admission and end
    running    change
{marks}

{cost.waiting} waiting behind {cost.running} running: {cost.extra_us:+.1f} us per step \
({cost.without_us:.1f} without, {cost.with_us:.1f} with)

A front of the queue that cannot be admitted, us per step
{front}

A client leaves whose {departure.requests} requests run: {departure.total_ms:.1f} ms, \
{departure.per_request_us:.1f} us each
One waiting request besides its token ids: {memory.bare_bytes:.0f} bytes, \
{memory.wire_bytes:.0f} as it comes from the wire"""


def table(report: Report) -> str:
    """Return the report as text; the ratio is vLLM's time over ours."""
    steady = [
        f"{row.running:11} {row.schedule_us:9.1f} {row.update_us:9.1f} {row.total_us:9.1f}"
        f" {_against_vllm(row.total_us, row.vllm_total_us)}"
        for row in report.steady_decode
    ]
    admission = [
        f"{row.case.replace('_', ' '):>11} {row.create_us:9.1f} {row.add_us:9.1f}"
        f" {row.schedule_us:9.1f} {row.update_us:9.1f} {row.total_us:9.1f}"
        f" {_against_vllm(row.total_us, row.vllm_total_us)}"
        for row in report.admission
    ]
    front = [
        f"{row.case.replace('_', ' '):>20} {row.extra_us:+9.1f}"
        f" ({row.without_us:.1f} without, {row.with_us:.1f} with)"
        for row in report.front_cost
    ]
    return _HEADS.format(
        steady="\n".join(steady),
        admission="\n".join(admission),
        marks="\n".join(f"{row.running:11} {row.change_us:9.1f}" for row in report.marks),
        tokens=report.admitted_tokens,
        cost=report.waiting_cost,
        front="\n".join(front),
        departure=report.departure,
        memory=report.waiting_memory,
    )


def main(
    argv: Sequence[str] | None = None, program: str = "python -m scripts.bench scheduler"
) -> int:
    """Measure and print; returns the exit status."""
    plan = Plan()
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for name, default in msgspec.structs.asdict(plan).items():
        flag = f"--{name.replace('_', '-')}"
        shown = " ".join(map(str, default)) if name == "running" else default
        text = f"{_FLAG_TEXTS[name]} (default: {shown})"
        nargs = "+" if name == "running" else None
        parser.add_argument(flag, nargs=nargs, type=int, default=default, metavar="N", help=text)
    settings = vars(parser.parse_args(argv))
    as_json = settings.pop("json")
    try:
        plan = Plan(**settings | {"running": tuple(settings["running"])})
    except ValueError as error:
        parser.error(str(error))
    report = measure(plan)
    print(msgspec.json.encode(report).decode() if as_json else table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
