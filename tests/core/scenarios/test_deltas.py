"""Messages to the worker: full data once, then only what changed."""

from tests.core.harness import PLAIN_TOKEN, Harness


def test_block_tables_travel_as_additions() -> None:
    """The numbers of computed tokens are not sent: the worker counts them."""
    bench = Harness()
    bench.add("a", 15, 20)
    bench.steps(3)
    grown = [step.scheduled_cached_reqs for step in bench.sent]
    assert bench.sent[0].scheduled_new_reqs[0].block_ids == [[1]]
    assert [rows.req_ids for rows in grown] == [[], [], [0]]
    assert grown[2].new_block_ids == [[[2]]]
    assert bench.worker.mirror[0].num_computed_tokens == 17


def test_a_steady_step_names_no_request() -> None:
    bench = Harness()
    for name in "abc":
        bench.add(name, 20)
    bench.steps(2)
    step = bench.sent[-1]
    assert step.num_scheduled_tokens == {}
    assert step.scheduled_cached_reqs.req_ids == []
    assert step.total_num_scheduled_tokens == 3


def test_who_gets_nothing_of_the_budget_is_named_with_zero() -> None:
    """While a waits for its token, c takes its place in the step; then a is served first."""
    guesses = {"a": {2: [PLAIN_TOKEN]}}
    bench = Harness(budget=2, depth=2, num_speculative_tokens=1, guesses=guesses)
    for name in "abc":
        bench.add(name, 1)
    assert bench.fill() == [{"a": 1, "b": 1}] * 2
    bench.update()
    assert bench.schedule() == {"a": 1, "b": 1}
    bench.update()
    assert bench.schedule() == {"b": 1, "c": 1}
    bench.update()
    assert bench.schedule() == {"a": 1, "b": 1}
    assert bench.sent[-1].num_scheduled_tokens == {2: 0}


def test_outputs_of_an_earlier_life_stay_outputs() -> None:
    bench = Harness()
    request = bench.add("a", 10, 5, outputs=[7, 8, 9])
    assert bench.step() == {"a": 13}
    (new,) = bench.sent[0].scheduled_new_reqs
    assert (len(new.token_ids) // 4, new.num_prompt_tokens) == (13, 10)
    bench.run()
    assert request.output_token_ids == [7, 8, 9, PLAIN_TOKEN, PLAIN_TOKEN]
    assert bench.finished["a"] == "length"
