"""docs/scheduling.md is right: its policy runs as printed, and its options exist."""

import re
from collections.abc import Iterator

import msgspec
import pytest

from core_proc.options import SchedulerOptions
from core_proc.policy import POLICIES
from protocol.config.setting_fields import all_settings
from tests.core.harness import Harness
from tests.paths import ROOT

TEXT = (ROOT / "docs" / "scheduling.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)

VLLM_HAS = {
    "num_blocks",
    "block_size",
    "kv_groups",
    "max_model_len",
    "eos_token_ids",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_steps_in_flight",
    "pipeline_parallel_size",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "policy",
    "enable_prefix_caching",
    "enable_kv_events",
    "scheduler_reserve_full_isl",
    "watermark",
}
"""Options of the scheduler that are not settings: facts of the model, or other names."""


@pytest.fixture
def lcfs() -> Iterator[None]:
    """The example of the page, registered for one test."""
    known = POLICIES.copy()
    (code,) = CODE
    exec(compile(code, "docs/scheduling.md", "exec"), {"__name__": "page"})
    yield
    POLICIES.clear()
    POLICIES.update(known)


@pytest.mark.usefixtures("lcfs")
def test_the_policy_of_the_page_serves_the_newest_first() -> None:
    bench = Harness(seqs=1, policy="lcfs")
    for name in "abc":
        bench.add(name, 10, 1)
    assert bench.steps(3) == [{"c": 10}, {"b": 10}, {"a": 10}]


@pytest.mark.usefixtures("lcfs")
def test_the_policy_of_the_page_preempts_the_oldest_and_all_end() -> None:
    bench = Harness(blocks=7, policy="lcfs")
    for name in "abc":
        bench.add(name, 30, 8)
    bench.steps(4)
    assert bench.preempted == ["a"]
    bench.run()
    assert {len(tokens) for tokens in bench.outputs.values()} == {8}
    assert bench.num_free == 6


def test_the_page_names_every_policy_and_every_switch_that_vllm_lacks() -> None:
    names = {item.name for item in msgspec.structs.fields(SchedulerOptions)}
    assert names >= VLLM_HAS
    on_page = set(re.findall(r"`([a-z_]+)`", TEXT)) | {
        flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+)", TEXT)
    }
    assert names - VLLM_HAS <= on_page
    assert set(POLICIES) <= on_page


def test_every_flag_and_file_on_the_page_exists() -> None:
    flags = set(re.findall(r"(?<![-<])--[a-z][a-z-]+", TEXT))
    assert flags <= {setting.flag for setting in all_settings()}
    for link in re.findall(r"\]\(\.\./([^)]+)\)", TEXT):
        assert (ROOT / link).is_file(), link
