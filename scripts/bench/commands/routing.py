"""`routing`: conversations over replicas of the null model, by policy.

The null model's steps take a time that grows with their tokens, and no processor. So the replicas
do not slow each other down, as if each had a separate machine, and the control plane is real.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from random import Random

from protocol.client import ReplicatedClient, ReplicatedOptions
from protocol.config import EngineConfig, RoutingPolicy
from protocol.config.settings import configure
from protocol.process.launch import EngineProcesses
from scripts.bench import conversations
from scripts.bench.client import BenchError
from scripts.bench.load import percentile
from scripts.bench.report import Record, RunRecord
from scripts.bench.rounds import add
from scripts.bench.workloads import token_ids
from worker_proc.startup.start import NULL_VOCAB_SIZE

_READY_TIMEOUT_S = 60.0
_BLOCK_SIZE = 16


def run(arguments: argparse.Namespace, record: Record) -> None:
    """Hold the same conversations with each policy, after its caches were emptied."""
    policies = [RoutingPolicy(name) for name in arguments.work]
    record.servers = {str(policy): "started by the tool" for policy in policies}
    record.peers = [str(policy) for policy in policies[1:]]
    record.engine = {"model": "null", "flags": []}
    for num_replicas in arguments.replicas:
        name = f"{num_replicas} replicas"
        record.workloads[name] = f"{arguments.conversations} conversations, {name}"
        held = [_conversations(arguments, repeat) for repeat in range(arguments.repeats)]
        num_cached = arguments.cache * max(map(conversations.num_tokens, held)) / num_replicas
        config = configure(
            model="null",
            data_parallel_size=num_replicas,
            null_step_ms=arguments.step_ms,
            null_token_ms=arguments.token_ms,
            block_size=_BLOCK_SIZE,
            enable_kv_events=arguments.kv_events,
            num_gpu_blocks_override=int(num_cached) // _BLOCK_SIZE,
            log_level="error",
        )
        with EngineProcesses.start(config) as engine:
            for repeat, one in enumerate(held):
                for policy in policies:
                    figures = asyncio.run(_measure(engine, config, policy, one, arguments))
                    seed = arguments.seed + repeat
                    add(record, RunRecord(name, str(policy), repeat, seed, figures))


def _conversations(arguments: argparse.Namespace, repeat: int) -> list[conversations.Conversation]:
    return conversations.make(
        Random(f"routing-{arguments.seed + repeat}"),
        token_ids(NULL_VOCAB_SIZE),
        count=arguments.conversations,
        num_turns=arguments.turns,
        num_systems=arguments.systems,
        begin_s=arguments.begin_s,
        pause_s=arguments.pause_s,
    )


async def _measure(
    engine: EngineProcesses,
    config: EngineConfig,
    policy: RoutingPolicy,
    held: Sequence[conversations.Conversation],
    arguments: argparse.Namespace,
) -> dict[str, float]:
    options = ReplicatedOptions(policy=policy, follow_kv_events=config.cache.enable_kv_events)
    async with ReplicatedClient(engine.addresses, options) as client:
        for each in client.clients:
            await each.wait_ready(_READY_TIMEOUT_S)
        if not await client.reset_prefix_cache():
            raise BenchError("the caches are in use")
        replies = await conversations.play(client, held, arguments.timeout_s)
    ttft_s = [reply.ttft_s for reply in replies]
    num_prompt_tokens = sum(reply.num_prompt_tokens for reply in replies)
    num_cached_tokens = sum(reply.num_cached_tokens for reply in replies)
    computed = [0] * len(engine.addresses)
    for reply in replies:
        computed[reply.replica] += reply.num_computed_tokens
    return {
        "hit_percent": 100 * num_cached_tokens / num_prompt_tokens,
        "ttft_p50_ms": 1000 * percentile(ttft_s, 50),
        "ttft_mean_ms": 1000 * statistics.mean(ttft_s),
        "ttft_p99_ms": 1000 * percentile(ttft_s, 99),
        "imbalance": max(computed) / statistics.mean(computed),
    }
