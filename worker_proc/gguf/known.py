"""Names of the architectures that are read, which are checked before torch is imported."""

from worker_proc.errors import UnsupportedModel
from worker_proc.gguf.model_header import Header

KNOWN = frozenset(
    {
        *("afmoe", "apertus", "arcee", "bailingmoe2", "bloom", "chatglm", "cohere2", "cohere2moe"),
        *("command-r", "dbrx", "deepseek2", "dots1", "ernie4_5", "ernie4_5-moe", "exaone"),
        *("exaone-moe", "exaone4", "falcon", "falcon-h1", "gemma", "gemma2", "gemma3", "gemma3n"),
        *("gemma4", "glm-dsa", "glm4", "glm4moe", "gpt-oss", "gpt2", "gptneox", "granite"),
        *("granitehybrid", "granitemoe", "hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "internlm2"),
        *("jais2", "jamba", "kimi-linear", "lfm2", "lfm2moe", "llama", "llama4", "mamba", "mamba2"),
        *("mellum", "mimo2", "minicpm", "minicpm3", "minimax-m2", "mistral3", "mpt", "nemotron"),
        *("nemotron_h", "nemotron_h_moe", "olmo", "olmo2", "olmoe", "orion", "pangu-embedded"),
        *("phi2", "phi3", "phimoe", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe"),
        *("qwen3moe", "qwen3next", "qwen3vl", "qwen3vlmoe", "seed_oss", "smollm3", "stablelm"),
        *("starcoder", "starcoder2", "xverse"),
    }
)
"""The keys of `ARCHITECTURES`."""


def check_known(header: Header) -> None:
    """Raise UnsupportedModel for a file of another architecture."""
    if header.architecture not in KNOWN:
        known = ", ".join(sorted(KNOWN))
        raise UnsupportedModel(
            f"{header.path}: general.architecture is {header.architecture[:100]!r}; supported:"
            f" {known}"
        )
