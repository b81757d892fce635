"""The core's metrics, which arrive as fields of `EngineStats` with its status messages."""

from protocol.api_core import LOOP_BUCKETS_S, STEP_TOKENS_BUCKETS

ENGINE_GAUGES = (
    ("num_requests_running", "Requests in the running set.", "num_running_reqs"),
    ("num_requests_waiting", "Requests in the queue.", "num_waiting_reqs"),
    ("num_requests_speculating", "Running requests with drafts.", "num_speculating_reqs"),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_cache_usage"),
    (
        "state_cache_usage_perc",
        "Share of the blocks for recurrent states in use, 0 to 1.",
        "state_cache_usage",
    ),
)
"""Name, help text, field; a field that is None is not exposed."""
ENGINE_COUNTERS = (
    ("num_preemptions", "Requests preempted.", "num_preemptions"),
    ("prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_cache_hits"),
    ("kv_blocks_stored", "KV blocks written to stores.", "kv_blocks_stored"),
    ("kv_tokens_loaded", "Tokens whose KV was read from stores.", "kv_tokens_loaded"),
    ("states_stored", "Recurrent states written to stores.", "states_stored"),
    ("states_loaded", "Recurrent states read from stores.", "states_loaded"),
    (
        "kv_remote_tokens_loaded",
        "Tokens whose KV was read from other machines, of kv_tokens_loaded.",
        "kv_remote_tokens_loaded",
    ),
    ("engine_steps", "Steps dispatched to the worker.", "num_steps"),
    ("fenced_frames", "Frames of an old epoch, dropped.", "fenced_frames"),
    ("quarantined_requests", "Requests found to kill workers.", "num_quarantined"),
    ("spec_decode_num_drafts", "Verifications of drafts.", "spec_decode_num_drafts"),
    ("spec_decode_num_draft_tokens", "Draft tokens.", "spec_decode_num_draft_tokens"),
    (
        "spec_decode_num_accepted_tokens",
        "Accepted draft tokens.",
        "spec_decode_num_accepted_tokens",
    ),
    ("worker_restarts", "Workers replaced.", "worker_restarts"),
)
"""Name, help text, field."""
ENGINE_HISTOGRAMS = (
    (
        *("core_loop_seconds", "Iterations of the core's loop.", LOOP_BUCKETS_S),
        *("loop_seconds_buckets", "loop_seconds_sum"),
    ),
    (
        *("iteration_tokens_total", "Tokens of a step.", STEP_TOKENS_BUCKETS),
        *("step_tokens_buckets", "step_tokens_sum"),
    ),
)
"""Name, help text, bounds, and the fields with the counts and the sum."""
