"""What the default run leaves out, so that it stays under ten minutes on two cores.

Each of these has a sibling that runs by default and shows the same property in another variant, at
another depth or on another attention backend. `scripts/test -m slow` runs them, and the long ones
that are marked where they stand.
"""

import pytest

VARIANTS = (
    "system/test_demo.py::test_stream_goes_on_after_kill_9[worker]",
    "system/test_hangs.py::test_long_steps_on_a_busy_machine_kill_nobody",
    "system/test_hangs.py::test_stopped_process_is_replaced_in_time_at_defaults[core]",
    "system/test_invariance.py::test_seed_decides_alone[float32]",
    "system/test_overload.py::test_past_every_bound_429_and_nothing_accepted_is_lost[flags1]",
    "system/test_overload.py::test_past_every_bound_429_and_nothing_accepted_is_lost[flags2]",
    "system/test_overload.py::test_past_every_bound_429_and_nothing_accepted_is_lost[flags3]",
    "system/test_pausing.py::test_a_pause_outlives_kill_9_and_then_every_stream_ends_exactly"
    "[pause-resume-victims0]",
    "system/test_pausing.py::test_a_pause_outlives_kill_9_and_then_every_stream_ends_exactly"
    "[pause-resume-victims2]",
    "system/test_pausing.py::test_a_pause_outlives_kill_9_and_then_every_stream_ends_exactly"
    "[sleep-wake_up-victims1]",
    "system/test_quarantine.py::test_only_the_culprit_is_refused_and_all_others_are_exact[exc@*]",
    "system/test_quarantine.py::test_only_the_culprit_is_refused_and_all_others_are_exact"
    "[hold:30000@*]",
    "worker/test_hybrid_kv.py::test_a_sleep_gives_the_memory_back_and_tokens_are_right_afterwards"
    "[gathering]",
    "worker/test_output_equality.py::test_tokens_are_equal_with_drafts[gathering-gemma3]",
    "worker/test_output_equality.py::test_tokens_are_equal_with_drafts[gathering-llama]",
    "worker/test_output_equality.py::test_tokens_are_equal_however_they_are_scheduled"
    "[gathering-gemma3]",
    "worker/test_zygote.py::test_forked_worker_computes_the_tokens_of_one_that_loaded_by_itself"
    "[float32]",
)

ALONE = "worker/test_zygote.py"
"""Counts the children of its own process, so it runs alone: `scripts/test -m slow` and its name."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them before the marks are looked at."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name in VARIANTS or name.startswith(ALONE):
            item.add_marker(pytest.mark.slow)
