"""The counters of the core's loop, and the statistics line in the log."""

import bisect
from collections.abc import Sequence

from core_proc.scheduler import Scheduler
from protocol.api_core import EngineStats


class Histogram:
    """Counts of observations by upper bound; the last bucket is open-ended."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum: float = 0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value


def scheduler_stats(scheduler: Scheduler) -> EngineStats:
    """Return the counters of a scheduler; all others are 0."""
    speculation, states = scheduler.speculation, scheduler.kv.states
    offload = scheduler.offload
    return EngineStats(
        num_running_reqs=len(scheduler.running),
        num_waiting_reqs=scheduler.num_waiting,
        kv_cache_usage=scheduler.kv.usage,
        num_preemptions=scheduler.num_preemptions,
        prompt_tokens=scheduler.num_prompt_tokens,
        generation_tokens=scheduler.num_generation_tokens,
        prefix_cache_queries=scheduler.num_prefix_queries,
        prefix_cache_hits=scheduler.num_prefix_hits,
        num_speculating_reqs=speculation.num_speculating,
        spec_decode_num_drafts=speculation.num_verifications,
        spec_decode_num_draft_tokens=speculation.num_draft_tokens,
        spec_decode_num_accepted_tokens=speculation.num_accepted_tokens,
        spec_decode_num_accepted_tokens_per_pos=list(speculation.accepted_per_position),
        kv_blocks_stored=0 if offload is None else offload.num_stored,
        kv_tokens_loaded=0 if offload is None else offload.num_loaded_tokens,
        states_stored=0 if offload is None else offload.num_stored_states,
        states_loaded=0 if offload is None else offload.num_loaded_states,
        kv_remote_tokens_loaded=0 if offload is None else offload.num_remote_tokens,
        state_cache_usage=None if states is None else states.usage,
    )


class StatsLine:
    """Renders the line of statistics once per interval."""

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._last = EngineStats()
        self._last_time = now

    def due(self, now: float) -> bool:
        return now - self._last_time >= self._interval_s

    def render(self, stats: EngineStats, now: float) -> str | None:
        """Return the line for the interval that ends now; None if nothing ran in it."""
        last, seconds = self._last, now - self._last_time
        self._last, self._last_time = stats, now
        if stats.num_steps == last.num_steps and not stats.num_running_reqs:
            return None
        queries = stats.prefix_cache_queries - last.prefix_cache_queries
        hits = stats.prefix_cache_hits - last.prefix_cache_hits
        prompt = (stats.prompt_tokens - last.prompt_tokens) / seconds
        generated = (stats.generation_tokens - last.generation_tokens) / seconds
        usage = f"KV cache usage: {stats.kv_cache_usage:.1%}, "
        if stats.state_cache_usage is not None:
            usage += f"State cache usage: {stats.state_cache_usage:.1%}, "
        return (
            f"Running: {stats.num_running_reqs} reqs, Waiting: {stats.num_waiting_reqs} reqs, "
            f"{usage}"
            f"Prefix cache hit rate: {hits / queries if queries else 0.0:.1%}, "
            f"Prompt: {prompt:.1f} tokens/s, Generation: {generated:.1f} tokens/s"
        )
