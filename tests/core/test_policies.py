"""The policies beyond arrival and priority, and the options that choose the victim."""

from typing import get_args

import pytest

from core_proc.options import SchedulerOptions
from core_proc.policy import Fair, ShortestPrefill
from core_proc.request import Request
from core_proc.scheduling.victims import VictimChoice
from protocol.config.engine_config import Weight
from protocol.sampling import SamplingParams
from tests.core.harness import Harness


def _order_of_finish(bench: Harness) -> list[str]:
    bench.run(limit=5000)
    return list(bench.finished)


def test_the_shortest_prompt_goes_first() -> None:
    bench = Harness(seqs=1, policy="shortest")
    for name, length in (("c", 300), ("a", 10), ("b", 50)):
        bench.add(name, length, 1)
    assert _order_of_finish(bench) == ["a", "b", "c"]


def test_ageing_lets_a_long_prompt_through_an_endless_stream_of_short_ones() -> None:
    bench = Harness(seqs=1, policy="shortest")
    bench.add("long", 800, 1)
    served = 0
    bench.add("short 0", 100, 1)
    for index in range(1, 1000):
        bench.add(f"short {index}", 100, 1)
        bench.step()
        if "long" in bench.finished:
            break
        served += 100
    # Overtaking ends once the newcomer's advantage of 700 tokens is aged away.
    assert served == pytest.approx(700 / ShortestPrefill.AGEING, abs=200)


def _tenants(weights: dict[str, float], tokens: dict[str, int], **options: object) -> Harness:
    """Return a harness with a long queue for each tenant."""
    bench = Harness(seqs=1, policy="fair", tenant_weights=weights, **options)  # type: ignore[arg-type]
    for tenant, length in tokens.items():
        for index in range(60):
            bench.add(f"{tenant}{index}", length, 1, tenant=tenant)
    return bench


def _share(bench: Harness, num_tokens: int) -> dict[str, float]:
    """Return each tenant's share of the first `num_tokens` prompt tokens."""
    served: dict[str, int] = {}
    while sum(served.values()) < num_tokens:
        for name, count in bench.step().items():
            tenant = bench.requests[name].tenant
            served[tenant] = served.get(tenant, 0) + count
    total = sum(served.values())
    return {tenant: count / total for tenant, count in sorted(served.items())}


def test_tenants_share_tokens_equally_however_large_their_requests_are() -> None:
    bench = _tenants({}, {"big": 200, "small": 20})
    shares = _share(bench, 2000)
    assert shares["small"] == pytest.approx(0.5, abs=0.06)


def test_weights_set_the_shares() -> None:
    bench = _tenants({"gold": 3.0}, {"gold": 50, "free": 50})
    assert _share(bench, 3000)["gold"] == pytest.approx(0.75, abs=0.04)


def test_weights_set_the_shares_after_requests_of_the_lowest_weight() -> None:
    """These advance virtual time by far, which must still have room for a single token."""
    lowest: float = get_args(Weight)[1].ge
    bench = Harness(seqs=1, policy="fair", tenant_weights={"lowest": lowest, "gold": 3.0})
    for index in range(20):
        bench.add(f"lowest{index}", 1000, 1, tenant="lowest")
    bench.run()
    for tenant in ("gold", "free"):
        for index in range(60):
            bench.add(f"{tenant}{index}", 50, 1, tenant=tenant)
    assert _share(bench, 3000)["gold"] == pytest.approx(0.75, abs=0.04)


def test_requests_without_a_tenant_are_shared_among_clients() -> None:
    """A tenant's requests have one account, whichever clients send them."""
    bench = Harness(seqs=1, policy="fair")
    for index in range(8):
        bench.add(f"many{index}", 50, 1, origin="10.0.0.1")
        bench.add(f"gold{index}", 50, 1, origin=f"10.0.1.{index}", tenant="gold")
    bench.add("one", 50, 1, origin="10.0.0.2")
    bench.add("posing", 50, 1, origin="10.0.0.3", tenant="10.0.0.2")
    order = _order_of_finish(bench)
    assert {"one", "posing"} <= set(order[:5])
    assert {name[:4] for name in order[-4:]} == {"gold", "many"}


def test_a_client_does_not_delay_others_that_name_the_same_adapter() -> None:
    bench = Harness(seqs=1, policy="fair", tenant_weights={"sql": 4.0})
    for index in range(8):
        bench.add(f"many{index}", 50, 1, origin="10.0.0.1", adapter_name="sql")
    bench.add("one", 50, 1, origin="10.0.0.2", adapter_name="sql")
    bench.add("base", 50, 1, origin="10.0.0.2")
    order = _order_of_finish(bench)
    assert order.index("one") <= 1
    assert order.index("base") <= 6, "an adapter's requests have the weight of its name"


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    bench = _tenants({}, {"busy": 50})
    _share(bench, 1500)
    for index in range(60):
        bench.add(f"late{index}", 50, 1, tenant="late")
    shares = _share(bench, 1000)
    assert shares["late"] == pytest.approx(0.5, abs=0.1)


def test_outputs_are_charged_too() -> None:
    """Both tenants' prompts are equal; the one that generates more gets fewer turns."""
    bench = Harness(seqs=1, policy="fair")
    for index in range(40):
        bench.add(f"talk{index}", 10, 60, tenant="talk")
        bench.add(f"ask{index}", 10, 2, tenant="ask")
    for _ in range(400):
        bench.step()
        # Newcomers are ordered by what their tenants have consumed until now.
    for index in range(40, 80):
        bench.add(f"talk{index}", 10, 60, tenant="talk")
        bench.add(f"ask{index}", 10, 2, tenant="ask")
    queue = [
        name for name in bench.queue if int(name.removeprefix("talk").removeprefix("ask")) >= 40
    ]
    assert queue.index("ask79") < queue.index("talk79")
    assert sum(name.startswith("ask") for name in queue[:20]) > 12


def test_the_accounts_of_tenants_that_are_gone_are_closed() -> None:
    policy = Fair(SchedulerOptions(policy="fair"))
    for index in range(10_000):
        request = Request(index, [1], SamplingParams(), tenant=f"t{index}")
        policy.arrived(request)
        policy.admitted(request)
        policy.left(request)
        policy._now += 2.0
    assert len(policy._line_ends) <= 2 * Fair.MIN_PRUNED


@pytest.mark.parametrize("victims", ["policy", "cheapest"])
def test_a_waiter_may_take_the_slot_of_a_less_important_request(victims: str) -> None:
    bench = Harness(seqs=2, policy="priority", preempt_for_priority=True, victim_choice=victims)
    bench.add("low", 20, 9, priority=5)
    bench.add("mid", 20, 9, priority=3)
    bench.steps(2)
    bench.add("high", 20, 3, priority=1)
    assert bench.step() == {"mid": 1, "high": 20}
    assert bench.preempted == ["low"]
    bench.run()
    assert {name: len(tokens) for name, tokens in bench.outputs.items()} == {
        "low": 9, "mid": 9, "high": 3,
    }  # fmt: skip


def test_a_waiter_may_take_the_blocks_of_less_important_requests() -> None:
    bench = Harness(blocks=9, policy="priority", preempt_for_priority=True)
    for name, priority in (("a", 7), ("b", 8), ("c", 0)):
        bench.add(name, 30, 12, priority=priority)
    bench.steps(2)
    bench.add("high", 80, 2, priority=1)
    assert bench.step() == {"c": 1, "high": 80}
    assert sorted(bench.preempted) == ["a", "b"]
    bench.run()
    assert len(bench.finished) == 4


def test_no_request_is_preempted_in_vain_or_for_one_of_equal_priority() -> None:
    bench = Harness(blocks=9, policy="priority", preempt_for_priority=True)
    bench.add("vital", 60, 12, priority=0)
    bench.add("low", 30, 12, priority=9)
    bench.steps(2)
    bench.add("big", 100, 2, priority=1)
    bench.add("equal", 100, 2, priority=9)
    assert bench.step() == {"vital": 1, "low": 1}
    assert bench.scheduler.num_preemptions == 0


def test_priority_does_not_preempt_by_default() -> None:
    bench = Harness(seqs=1, policy="priority")
    bench.add("low", 20, 9, priority=5)
    bench.step()
    bench.add("high", 20, 3, priority=1)
    bench.steps(3)
    assert bench.scheduler.num_preemptions == 0


def test_the_cheapest_victim_is_the_one_with_the_least_to_compute_again() -> None:
    preempted = {}
    for choice in ("policy", "cheapest"):
        bench = Harness(blocks=9, victim_choice=choice)
        bench.add("small", 16, 20)
        bench.add("large", 95, 20)
        bench.steps(3)
        preempted[choice] = bench.preempted
        bench.run()
        assert {name: len(tokens) for name, tokens in bench.outputs.items()} == {
            "small": 20, "large": 20,
        }  # fmt: skip
    assert preempted == {"policy": ["large"], "cheapest": ["small"]}


def test_importance_comes_before_cost() -> None:
    bench = Harness(blocks=9, victim_choice="cheapest", policy="priority")
    bench.add("small", 16, 20, priority=1)
    bench.add("large", 95, 20, priority=2)
    bench.steps(3)
    assert bench.preempted == ["large"]


def test_blocks_that_others_share_count_neither_as_loss_nor_as_gain() -> None:
    """The long prompt is nearly all shared: computing it again is cheap, and frees little."""
    shared = list(range(500, 564))
    bench = Harness(blocks=10, caching=True, victim_choice="cheapest")
    bench.add("one", [*shared, 1, 2], 30)
    bench.add("two", [*shared, 3, 4], 30)
    bench.add("own", 46, 30)
    while not bench.scheduler.num_preemptions:
        assert bench.step()
    assert bench.preempted == ["two"], "2 computed tokens for a block, against 16 or more"
    bench.run()
    assert len(bench.finished) == 3


def test_no_request_is_preempted_for_a_waiter_that_the_watermark_keeps_out() -> None:
    bench = Harness(blocks=11, policy="priority", preempt_for_priority=True, watermark=0.3)
    bench.add("keep", 66, 9, priority=0)
    bench.add("low", 20, 9, priority=1)
    bench.step()
    bench.add("high", 60, 9, priority=0)
    assert bench.steps(2) == [{"keep": 1, "low": 1}] * 2


def test_no_request_is_preempted_for_a_waiter_without_budget() -> None:
    bench = Harness(
        seqs=2,
        budget=40,
        policy="priority",
        preempt_for_priority=True,
        max_num_partial_prefills=1,
    )
    bench.add("low", 10, 9, priority=1)
    bench.step()
    bench.add("long", 400, 2, priority=0)
    bench.step()
    bench.add("high", 100, 2, priority=0)
    assert bench.step() == {"low": 1, "long": 39}
    assert bench.scheduler.num_preemptions == 0


def test_a_waiter_takes_the_budget_of_a_less_important_prompt() -> None:
    bench = Harness(budget=32, policy="priority", preempt_for_priority=True)
    bench.add("long", 300, 2, priority=5)
    bench.step()
    bench.add("high", 20, 2, priority=0)
    assert bench.step() == {"high": 20, "long": 12}, "long begins again, with what is left"
    bench.run()
    assert set(bench.finished) == {"long", "high"}


def test_blocks_that_the_waiter_itself_hits_do_not_count_as_gain() -> None:
    """The victim's blocks would be freed and reused at once as hits, which frees nothing."""
    shared = list(range(500, 548))
    bench = Harness(blocks=9, caching=True, policy="priority", preempt_for_priority=True)
    bench.add("keep", 60, 4, priority=0)
    bench.add("low", [*shared, 1], 4, priority=5)
    bench.step()
    bench.add("high", [*shared, *range(48)], 4, priority=1)
    assert bench.step() == {"keep": 1, "low": 1}
    assert bench.scheduler.num_preemptions == 0
    bench.run()


def test_no_more_give_way_than_are_needed() -> None:
    """One slot is needed; the budget of the others would only make the first chunk longer."""
    bench = Harness(seqs=64, budget=256, policy="priority", preempt_for_priority=True)
    for index in range(64):
        bench.add(f"low{index}", 4, 50, priority=5)
    bench.steps(2)
    bench.add("urgent", 256, 4, priority=0)
    granted = bench.step()
    assert len(bench.preempted) == 1
    assert granted["urgent"] == 256 - 63


def test_a_waiter_gets_past_the_watermark_by_as_many_victims_as_it_takes() -> None:
    bench = Harness(blocks=21, policy="priority", preempt_for_priority=True, watermark=0.2)
    bench.add("a", 128, 50, priority=5)
    bench.add("b", 112, 50, priority=5)
    bench.steps(2)
    bench.add("urgent", 160, 10, priority=0)
    assert bench.step()["urgent"] == 160


def test_victims_that_share_their_blocks_free_them_together() -> None:
    shared = list(range(10, 10 + 16 * 7))
    bench = Harness(blocks=11, caching=True, policy="priority", preempt_for_priority=True)
    bench.add("a", [*shared, 1], 30, priority=5)
    bench.add("b", [*shared, 3], 30, priority=5)
    bench.steps(2)
    bench.add("urgent", 64, 4, priority=0)
    assert bench.step() == {"urgent": 64}
    assert sorted(bench.preempted) == ["a", "b"]


def test_a_request_that_was_preempted_often_is_spared() -> None:
    bench = Harness(victim_choice="cheapest")
    small, large = bench.add("small", 4, 50), bench.add("large", 40, 50)
    bench.step()
    assert bench.scheduler.victims.choose(bench.scheduler.running) is small
    small.num_preemptions = VictimChoice.MAX_CHEAP_PREEMPTIONS
    assert bench.scheduler.victims.choose(bench.scheduler.running) is large


def test_what_never_ran_is_not_charged() -> None:
    bench = Harness(policy="fair", seqs=1, budget=64)
    bench.add("run", 4, 100, tenant="z")
    bench.step()
    for index in range(50):
        bench.add(f"a{index}", 60, 8, tenant="a")
        bench.abort(f"a{index}")
    for index in range(20):
        bench.add(f"b{index}", 60, 8, tenant="b")
    bench.add("a", 60, 8, tenant="a")
    assert bench.queue.index("a") <= 1


def test_new_tenants_without_end_leave_a_bounded_number_of_accounts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Fair, "MIN_PRUNED", 200)
    monkeypatch.setattr(Fair, "MAX_TENANTS", 400)
    bench = Harness(policy="fair")
    for index in range(1000):
        bench.add(f"r{index}", 4, 1, tenant=f"t{index}")
        bench.step()
    policy = bench.scheduler.policy
    assert isinstance(policy, Fair)
    assert len(policy._line_ends) <= 401


def test_a_prompt_whose_copy_was_lost_counts_whole_again() -> None:
    bench = Harness(policy="shortest", num_host_blocks=100)
    bench.add("long", 400, 50)
    bench.steps(3)
    bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    bench.add("short", 100, 50)
    assert bench.queue == ["short", "long"]
    assert bench.scheduler.swapper.num_swapped_out == 0
