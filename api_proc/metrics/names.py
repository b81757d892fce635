"""Names of metrics: `troika:NAME` where vLLM has `vllm:NAME`, else `troika_NAME`.

Prometheus reserves the colon for recording rules.
"""

VLLM_NAMES = frozenset(
    (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("num_preemptions", "prompt_tokens", "generation_tokens", "request_success"),
        *("prefix_cache_queries", "prefix_cache_hits", "spec_decode_num_drafts"),
        *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
        *("request_params_n", "request_params_max_tokens"),
        *("request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds"),
        *("request_prefill_kv_computed_tokens", "request_max_num_generation_tokens"),
        *("iteration_tokens_total", "cache_config_info", "lora_requests_info"),
    )
)
"""Metrics that vLLM has, too; counters without `_total`."""


def metric_name(name: str) -> str:
    """Return the name of a metric as it is exposed."""
    return f"troika:{name}" if name in VLLM_NAMES else f"troika_{name}"
