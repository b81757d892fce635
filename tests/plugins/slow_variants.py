"""Marks tests that the default run leaves out, so that it stays short on two cores.

Nearly each has a sibling that runs by default and tests the same property in another variant, at
another depth or on another attention backend; a few depend on the machine more than on the code.
`scripts/test -m slow` runs them and the tests that are marked as slow where they are defined.
"""

import pytest

from tests.paths import ROOT

VARIANTS = {
    "core/test_stateful.py": {
        # .ci/run runs these seeds, too.
        "test_any_sequence_of_events_keeps_every_promise": "1 2 3 4",
    },
    "scripts/test_bench.py": {
        # test_routing_compares_policies_on_the_same_conversations starts engines, too.
        "test_prefill_compares_roles_of_replicas_at_the_same_rates": "",
        "test_startup_measures_each_start": "",
        "test_growth_measures_each_point_and_leaves_out_what_does_not_fit": "",
    },
    "scripts/test_bench_scheduler.py": {
        "test_the_table_compares_with_vllm_where_there_is_a_figure": "",
    },
    "simulation/test_simulation.py": {
        # .ci/run simulates far more lives, with all of these faults and features.
        "test_no_violation_under_any_fault": "safety progress",
        "test_clients_resume_after_the_death_of_the_api_on_a_failing_disk": "safety progress",
        "test_drafts_survive_deaths": "False True",
        "test_adapters_survive_deaths": "safety progress",
        "test_grammars_and_vectors_survive_deaths": "",
        "test_standbys_are_promoted_and_replaced": "",
        "test_planted_bugs_are_found": (
            "progress-drain-at-once safety-drop-token safety-repeat-token "
            "safety-skip-epoch-check safety-stateful-random safety-outputs-as-prompt "
            "safety-resume-other-seed safety-forget-pause safety-forget-grammars "
            "safety-grammar-from-start progress-swap-vectors safety-share-prefixes "
            "safety-keep-turns progress-refuse-at-once progress-keep-wrong-drafts "
            "safety-forget-adapters progress-stale-states progress-stateful-random"
        ),
        # Flipped frames are dropped, too, and reordered ones are late.
        "test_damaged_frames_alone_violate_nothing": "truncate drop delay duplicate",
        "test_the_table_names_the_kind_of_a_bug": "drop-token-lost repeat-token-duplicated",
    },
    "soak/test_soak.py": {
        "test_short_soak": "",
    },
    "system/recovery/test_chaos.py": {
        "test_clients_read_on_after_the_death_of_the_api": "",
        "test_kills_at_a_steady_rate_change_no_stream": "",
        "test_clients_that_come_back_too_late_have_lost_their_stream": "",
        "test_death_at_a_failpoint_changes_no_answer": (
            "exc-worker.mid_step-worker kill9-worker.after_step-worker exc-core.before_reply-core"
        ),
        "test_other_servers_are_measured_by_the_same_client": "",
    },
    "system/models/test_demo.py": {
        "test_official_client_against_the_real_engine": "",  # tests/clients runs the same client.
        "test_many_clients_share_the_engine": "",
        "test_prefix_cache_is_seen_in_usage": "",
        "test_stream_continues_after_kill_9": "core worker",
        "test_stream_of_rounded_numbers_continues_after_kill_9": "w8a8",
    },
    "system/embedding/test_embedding_states.py": {
        "test_an_engine_is_closed_after_the_supervisor_was_killed_while_workers_stood_still": (
            "started"
        ),
        "test_cycles_leak_nothing_and_touch_nothing": "5",
        "test_an_engine_is_closed_while_a_start_hangs": "core.load",
        "test_an_engine_is_closed_while_it_recovers": "worker",
        "test_an_engine_is_closed_by_a_host_with_a_fork_that_lives_on": "closes",
        # test_embedding.py kills the core, too.
        "test_streams_of_a_host_survive_a_killed_core": "",
        # test_llm_lifetime.py closes engines in running loops, too.
        "test_an_engine_is_closed_within_a_running_loop": "",
    },
    "system/startup/test_ending.py": {
        # test_running_request_is_finished_before_the_end has the same end.
        "test_an_embedded_engine_finishes_although_a_process_is_killed": "worker",
    },
    "system/recovery/test_hangs.py": {
        "test_api_with_a_stopped_loop_is_replaced": "SIGSTOP",
        "test_long_steps_on_a_busy_machine_cause_no_kill": "",
        "test_process_that_starts_waits_for_a_stopped_supervisor": "",
        "test_step_that_never_ends_is_killed_after_its_stacks_are_printed": "delay",
        "test_stopped_process_is_replaced_in_time_at_defaults": "core worker",
    },
    "system/models/test_invariance.py": {
        "test_seed_decides_alone": "float32 bfloat16-w4a16 bfloat16",
    },
    "system/api/test_api_processes.py": {
        "test_both_accept_from_a_unix_socket": "",  # test_first_hour.py uses a Unix socket.
    },
    "system/api/test_latency.py": {
        "test_tokenizing_a_megabyte_does_not_stall_other_streams": "",
    },
    "system/recovery/test_memory_pressure.py": {
        "test_streams_under_memory_pressure_survive_kill_9": "recompute fair shortest priority",
    },
    "system/offload/test_offload.py": {
        "test_a_request_that_is_moved_brings_its_blocks": "",  # test_remote_blocks.py moves one.
    },
    "system/api/test_overload.py": {
        "test_past_every_bound_429_and_nothing_accepted_is_lost": "flags1 flags2 flags3",
    },
    "system/recovery/test_pausing.py": {
        "test_a_pause_outlives_kill_9_and_then_every_stream_ends_exactly": (
            "pause-resume-victims0 pause-resume-victims2 sleep-resume-victims1"
        ),
        "test_over_http_a_paused_stream_is_silent_and_a_shutdown_lets_it_end": "/sleep",
    },
    "system/recovery/test_quarantine.py": {
        "test_only_the_poison_request_is_refused_and_all_others_are_exact": (
            "exc@*-1 hold:30000@*-1"  # test_hangs.py kills processes that hang.
        ),
    },
    "system/offload/test_remote_blocks.py": {
        "test_a_machine_that_hangs_delays_its_requests_and_no_stream": "",
        "test_blocks_that_are_damaged_or_missing_there_are_computed": "damage remove",
        "test_kill_9_of_the_reader_amid_a_load_continues_exactly": "core",
    },
    "system/machines/test_replicas.py": {
        # tests/protocol has the policies alone.
        "test_requests_are_spread_evenly": "least_tokens round_robin",
        "test_streams_continue_while_a_replica_is_replaced": "restart_core",
    },
    "system/recovery/test_restart.py": {
        "test_leaving_api_finishes_its_streams_while_its_successor_serves": "",
        "test_clients_do_not_notice_a_planned_restart": (
            "0-core-SIGTERM 0-api-SIGTERM 0-worker-command 1-worker-SIGTERM"
        ),
        "test_restart_that_is_not_possible_is_refused": "",
        "test_worker_that_does_not_leave_is_killed": "",
    },
    "system/recovery/test_resume.py": {
        "test_killed_streams_equal_undisturbed_ones": "worker-worker",
        # tests/system/ranks/test_ranks.py kills processes of ranks with a draft model.
        "test_streams_with_a_draft_model_equal_those_without": "core-worker",
    },
    "system/recovery/test_resumption.py": {
        "test_stream_in_pieces_is_the_stream_in_one": (
            "api-plain api-usage api-echo api-sampled core-sampled core-chat worker-sampled "
            "worker-chat api-two -usage -echo -two"
        ),
        # test_stream_in_pieces_is_the_stream_in_one kills the API, too.
        "test_many_clients_come_back_after_each_death_of_the_api": "",
    },
    "system/recovery/test_standby.py": {
        "test_standby_that_hangs_is_replaced_when_it_is_needed": "",
        "test_three_deaths_within_ten_seconds": "",
        "test_demo_model_continues_with_the_standby": "",
        "test_dead_processes_are_replaced_and_no_token_is_lost": (
            "standby zygote standby+worker zygote+worker worker+zygote worker+standby+zygote "
            "core+worker worker+standby"
        ),
        "test_worker_does_without_helpers": "",
        "test_zygote_that_hangs_is_replaced_when_it_is_needed": "",
    },
    "system/recovery/test_standby_core.py": {
        "test_without_a_standby_the_core_is_started_anew": "",
        "test_promoted_core_is_watched_and_knows_what_its_predecessor_died_of": "",
        "test_standby_that_hangs_is_replaced": "",
        "test_dead_processes_are_replaced_and_no_token_is_lost": (
            "standby_core+core worker+core core+standby_core standby_core"
        ),
    },
    "system/recovery/test_supervisor.py": {
        "test_idle_engine_needs_no_cpu": "",
    },
    "system/api/test_tool_calls.py": {
        "test_official_client": "",
        "test_official_client_of_responses": "",
        # The calls in test_messages.py are made by a grammar of the null model's tokens, too.
        "test_required_calls_are_generated_and_survive_the_death_of_worker_and_core": "",
    },
    "worker/adapters/test_adapters.py": {
        "test_every_row_is_that_of_its_adapter_alone_with_the_same_bits_in_every_schedule": (
            "llama-bfloat16-modules phi3-float32-native olmo2-float32-native "
            "glm4-float32-native llama_mlp_bias-float32-native granite-bfloat16-native "
            "llama-float32-native"
        ),
        "test_adapters_on_rounded_weights": "w8a16",
        "test_adapters_on_a_quantized_checkpoint": "int_quantized_w8a8-bfloat16",
    },
    "worker/test_bitwise.py": {
        "test_contexts_of_several_sections_have_the_same_bits_in_every_schedule": (
            "1324-bfloat16 None-float32"
        ),
        "test_logits_are_the_same_bits_in_every_schedule": (
            "llama_mlp_bias-auto-bfloat16 llama-off-bfloat16 glm4-auto-bfloat16 "
            "gpt2_gelu_tanh-auto-bfloat16 granite-auto-bfloat16 phi3-auto-bfloat16 "
            "gemma3n_shared-auto-bfloat16 granite_swa-auto-bfloat16 mixtral-auto-bfloat16 "
            "qwen2_moe-auto-bfloat16 olmo2-auto-bfloat16 llama-auto-bfloat16 "
            "llama_wide_vocab_tied-auto-bfloat16 llama4-auto-bfloat16 gemma3-auto-bfloat16 "
            "qwen3_moe-auto-bfloat16"
        ),
    },
    "worker/kv/test_coded_kv.py": {
        "test_logits_are_the_same_bits_in_every_schedule": (
            "phi3-bfloat16-fp8 granite-bfloat16-int8 llama-float32-int8"
        ),
        "test_kernels_that_compute_something_else_are_refused": "float32-int8 bfloat16-fp8",
        # The test above has this type.
        "test_tokens_are_equal_however_they_are_scheduled": "fp8_e4m3",
    },
    "worker/parallel/test_divided_adapters.py": {
        "test_ranks_use_their_parts_of_adapters": "phi3-targets1-2-auto",
        "test_stages_use_the_matrices_of_their_layers": "gpt2-targets1-2-1",
    },
    "worker/parallel/test_divided_drafts.py": {
        "test_stages_verify_drafts": "2-1",  # test_divided_states.py verifies drafts.
        # test_all_ranks_verify_the_drafts_of_one has drafts of a model.
        "test_ranks_verify_drafts": "",
    },
    "worker/parallel/test_divided_states.py": {
        "test_stages_have_the_logprobs_of_one_worker": "bamba lfm2 rwkv",
        "test_tokens_do_not_depend_on_the_batch_the_cut_or_a_restart": "lfm2 mamba2 qwen3_5_text",
    },
    "worker/cuda/test_attention_kernels.py": {
        "test_keys_that_all_queries_of_a_tile_see_need_no_mask": (
            "140-torch.float32 None-torch.float32"
        ),
        "test_a_mixed_step_equals_plain_attention": "wide window_sinks one_head_each_split",
    },
    "worker/cuda/test_batch_invariance.py": {
        "test_a_product_has_the_same_bits_in_every_batch": "False-dtype0 True-dtype1",
        "test_attention_has_the_same_bits_in_every_cut": "None-False-dtype0 13-True-dtype1",
        # Its products and its attention are tested alone.
        "test_a_model_resumes_exactly": "",
    },
    "worker/cuda/test_choice.py": {
        "test_equals_full_sort_reference": "256-16384-1.0 512-16384-0.02",
    },
    "worker/cuda/test_flashinfer_attention.py": {
        # The next test has single steps.
        "test_a_model_is_planned_once_for_layers_that_are_alike": "",
        "test_a_step_equals_that_of_the_engines_kernels": (
            "None-None-True 5-2.0-False None-None-False"
        ),
    },
    "worker/cuda/test_run_ahead.py": {
        # test_requests_that_are_preempted_continue_exactly compares tokens, too.
        "test_tokens_are_those_of_the_host": "True False",
    },
    "worker/gguf/test_gguf.py": {
        "test_tokens_are_those_of_the_dequantized_weights": "llama_tied phi3",
        "test_other_types_are_dequantized": "23",
    },
    "worker/kv/test_hybrid_kv.py": {
        "test_a_sleep_gives_the_memory_back_and_tokens_are_right_afterwards": "sdpa native",
        "test_blocks_that_a_window_has_passed_are_never_read": (
            "sdpa-gemma2 sdpa-gemma3 sdpa-mistral_window native-gemma2 native-mistral_window"
        ),
        "test_preempting_by_swap_changes_no_token": "sdpa-llama sdpa-gemma3 native-llama",
        "test_tokens_survive_a_stay_on_the_host": "sdpa-llama sdpa-gemma3 native-llama",
        "test_windows_may_be_left_to_attention": "gemma2 mistral_window",
    },
    "worker/startup/test_lean_import.py": {
        "test_worker_loads_without_what_it_never_uses": "",
    },
    "worker/test_output_equality.py": {
        "test_tokens_are_equal_however_they_are_scheduled": ("sdpa-gemma3 sdpa-llama native-llama"),
        "test_tokens_are_equal_with_drafts": ("sdpa-gemma3 sdpa-llama native-llama native-gemma3"),
    },
    "worker/test_parity.py": {
        "test_outputs_equal_generate_in_every_mode": (
            "sdpa-llama_tied sdpa-qwen2 sdpa-qwen3 sdpa-gemma2 sdpa-phi3 "
            "sdpa-gpt2 sdpa-opt sdpa-mixtral sdpa-qwen3_moe sdpa-deepseek_v3 sdpa-mistral_window "
            "sdpa-granite4_dense sdpa-granite sdpa-olmo2 sdpa-smollm3 sdpa-glm4 "
            "sdpa-gemma3_vision native-llama_tied native-granite4_dense native-smollm3 native-opt "
            "sdpa-olmoe native-qwen2 native-mixtral native-olmoe sdpa-deepseek_v2 "
            "sdpa-glm4_moe_lite native-glm4_moe_lite native-minicpm3 "
            "sdpa-gemma3n_shared sdpa-gemma4_shared sdpa-gemma3 sdpa-llama4 sdpa-jamba sdpa-bamba "
            "sdpa-gpt_oss native-gemma4_shared native-gemma3_vision native-deepseek_v2 native-glm4 "
            "sdpa-bloom native-falcon_new native-phi3 native-olmo2 native-granite native-gpt_neo "
            "native-qwen3 sdpa-qwen3_next native-mistral_window "
            "native-gemma2 "  # test_stages_compute_the_tokens_of_the_whole_model has it.
            "native-qwen3_next native-lfm2 "  # test_few_state_blocks_… has the same outputs.
            "native-gemma3 native-qwen3_moe"  # gpt_oss has windows and experts, too.
        ),
    },
    "worker/loading/test_proofs.py": {
        "test_a_quantization_is_proven_by_itself": "w4a16 w8a16",
        "test_a_second_start_proves_nothing_and_computes_the_same": (
            "llama-w8a16 llama-w4a16 gemma2-None"
        ),
    },
    "worker/quantization/test_quantization.py": {
        "test_greedy_tokens_are_those_of_the_rounded_weights": (
            "dots1-w8a16 llama_tied-w8a16 qwen3_moe-w4a16"
        ),
        "test_logits_are_the_same_bits_in_every_schedule": (
            "qwen3-w8a16 llama-w8a16 qwen3_moe-w4a16"
        ),
        "test_modules_take_the_place_of_the_native_decoder": "qwen3_moe-w4a16 qwen3_moe-w8a8",
        "test_tokens_of_mixtures_are_those_of_a_checkpoint_of_rounded_weights": (
            "dots1-w4a16 bamba-w4a16 jamba-w4a16 lfm2-w4a16 qwen3_moe-w4a16"
        ),
        "test_codes_take_the_place_of_the_weights": "w8a16-False w8a8-False",
    },
    "worker/quantization/test_quantized_checkpoints.py": {
        "test_logits_are_the_same_bits_in_every_schedule": (
            "int_quantized_w8a8-0 int_quantized_w8a8-2 fp8_blocks-"
        ),
        "test_tokens_in_float32_are_those_of_the_dequantized_checkpoint": (
            "float_quantized_channel-0 float_quantized_channel-2 bitsandbytes_nf4_nested-1 "
            "gptq4_128_sym_v1- int_quantized_w8a16- pack_quantized8_-1_sym- "
            "bitsandbytes_fp4- float_quantized_channel-1 gptq8_-1_asym_v2- "
            "float_quantized_tensor-"
        ),
    },
    "worker/parallel/test_ranks.py": {
        "test_other_families_have_the_same_bits_in_every_batch": "olmo2",
    },
    "worker/recurrent/test_recurrent.py": {
        "test_few_state_blocks_are_shared_by_many_requests": "jamba bamba",
    },
    "worker/drafting/test_draft_model.py": {
        "test_tokens_and_logprobs_are_those_without_drafts": "llama-llama gemma3-gemma3",
        "test_every_draft_of_the_model_itself_is_right": (
            "llama-chunked llama-whole gemma3-prefix_cache llama-preempted"
        ),
    },
    "worker/drafting/test_speculation.py": {
        "test_tokens_and_logprobs_are_those_without_drafts": (
            "gemma3-sdpa-float32 llama-native-float32 llama-sdpa-float32 gemma3-native-float32 "
            "llama-native-bfloat16"
        ),
    },
    "worker/parallel/test_stages.py": {
        "test_every_architecture_has_its_logprobs_or_is_refused": "llama mixtral gemma3 gpt_oss",
        "test_preempted_requests_continue": "0 1048576",
        "test_stages_compute_the_tokens_of_the_whole_model": "llama experts tied",
        "test_stages_have_keys_and_values_in_codes": "int8",
        "test_stages_read_the_codes_of_a_checkpoint": (
            "fp8_blocks-float32 pack_quantized4_32_asym-float32 int_quantized_w8a8-bfloat16 "
            "int_quantized_w8a8-float32 fp8_blocks-bfloat16"
        ),
        "test_stages_round_their_weights_as_one_worker_does": "llama-w8a16 mixtral-w4a16",
        "test_stages_read_the_blocks_of_a_gguf_file": "",
    },
    "worker/decoder/test_steady_decode.py": {
        "test_random_steps_have_the_bits_of_newly_packed_steps": (
            "True-llama-float32 False-llama-bfloat16 False-gemma3-float32 "
            "True-gemma3-bfloat16 False-llama-float32 True-llama-bfloat16"
        ),
    },
    "worker/decoder/test_whole.py": {
        "test_rows_have_their_logits_in_any_order": "olmo2",
        "test_one_call_has_the_bits_of_the_modules": (
            "llama_tied-float32 qwen2-float32 qwen3-float32 mistral_window-float32 "
            "gemma2-float32 phi3-float32 smollm3-float32 glm4-float32 olmo2-float32 "
            "mixtral-float32 olmoe-bfloat16 qwen3_moe-float32"
        ),
    },
    "worker/startup/test_zygote.py": {
        "test_forked_worker_computes_the_tokens_of_one_that_loaded_by_itself": (
            "float32-none bfloat16-w4a16 bfloat16-w8a8"
        ),
    },
    "clients/test_clients.py": {
        # test_demo_chat.py and test_structured_output.py use the same client.
        "test_openai_python": "",
    },
    "system/embedding/test_launch.py": {
        "test_close_is_bounded_in_any_state": "19-core",
        # test_embedding_states.py starts and closes engines, too.
        "test_engine_answers_and_ends_with_its_context": "",
    },
    "system/machines/test_machines.py": {
        # test_host_agents.py has replicas on other machines, too.
        "test_an_api_has_replicas_on_other_machines": "",
    },
    "system/models/test_demo_chat.py": {
        # test_tool_calls.py kills the core.
        "test_a_call_continues_exactly_after_kill_9": "core",
    },
    "worker/loading/test_context.py": {
        "test_all_texts_have_the_factors_of_the_longest_one": "256",
        "test_tokens_beyond_the_stated_length_are_those_of_transformers": "linear",
    },
    "worker/attention/test_latent.py": {
        "test_modules_are_replaced_with_their_rotation": (
            "bailing_hybrid-False deepseek_v2-False minicpm3-True"
        ),
    },
    "worker/loading/test_loader.py": {
        "test_towers_are_neither_built_nor_read": "llava smolvlm",
    },
    "worker/modules/test_packed_table.py": {
        "test_a_model_holds_its_embedding_as_codes": "scaled untied",
    },
    "system/models/test_gguf.py": {
        "test_a_damaged_file_is_refused_before_any_process_starts": "0 60",
    },
    "worker/quantization/test_selection.py": {
        "test_ranks_have_parts_of_the_codes": "pack_quantized4_32_asym-llama-2",
    },
    "simulation/test_scale.py": {
        # test_simulation.py reproduces a seed, too.
        "test_a_seed_is_reproduced": "",
    },
}
"""Tests by file, with the variants to leave out; "" leaves out the whole test."""

NAMES = {
    f"tests/{file}::{test}[{variant}]" if variant else f"tests/{file}::{test}"
    for file, tests in VARIANTS.items()
    for test, variants in tests.items()
    for variant in variants.split() or [""]
}


UNKNOWN = pytest.StashKey[list[str]]()
"""Those of `NAMES` that no test has, as far as the collected files show."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the marks before pytest selects by them."""
    for item in items:
        if item.nodeid in NAMES:
            item.add_marker(pytest.mark.slow)
    # With such arguments not all tests of a file are collected.
    is_part = config.getoption("lf", False) or any("::" in argument for argument in config.args)
    config.stash[UNKNOWN] = [] if is_part else unknown_names({item.nodeid for item in items})


def unknown_names(found: set[str]) -> list[str]:
    """Return names without a test in the files of the tests that were found, or without a file."""

    def file_of(name: str) -> str:
        return name.partition("::")[0]

    files = {file_of(name) for name in found}
    return [
        name
        for name in sorted(NAMES - found)
        if file_of(name) in files or not (ROOT / file_of(name)).exists()
    ]
