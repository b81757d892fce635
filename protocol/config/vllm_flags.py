"""Flags of vLLM that this engine does not have, with what takes their place."""

_GRAPHS = "decode steps are CUDA graphs, and --enforce-eager switches them off"
_GRAMMARS = "grammars need no flag"
_KIND = "a model's kind is read from its files"
_TEXT_ONLY = "only text is served"
INSTEAD = {
    "chat-template-content-format": "the format is read from the template",
    "compilation-config": _GRAPHS,
    "cuda-graph-sizes": _GRAPHS,
    "disable-log-requests": "--access-log off leaves out the lines of requests",
    "disable-log-stats": "--log-level warning leaves out the lines of statistics",
    "disable-uvicorn-access-log": "--access-log off leaves out the lines of requests",
    "distributed-executor-backend": "--ray places engines in a cluster",
    "enable-auto-tool-choice": "tools need no flag; --tool-call-parser names the format",
    "enable-log-requests": "--access-log chooses the lines of requests",
    "enable-reasoning": "reasoning needs no flag; --reasoning-parser names the format",
    "enable-sleep-mode": "--enable-admin-routes has POST /sleep",
    "guided-decoding-backend": _GRAMMARS,
    "hf-token": "the variable HF_TOKEN is read",
    "kv-transfer-config": "--kv-offload-bytes and --kv-offload-dir keep KV blocks",
    "limit-mm-per-prompt": _TEXT_ONLY,
    "load-format": "the format is read from the files",
    "max-logprobs": "a request may ask for 20",
    "max-seq-len-to-capture": _GRAPHS,
    "mm-processor-kwargs": _TEXT_ONLY,
    "override-generation-config": "requests have these parameters",
    "runner": _KIND,
    "speculative-config": "--num-speculative-tokens and --speculative-model",
    "structured-outputs-config": _GRAMMARS,
    "swap-space": "--swap-space-bytes takes bytes",
    "task": _KIND,
    "trust-remote-code": "code from a checkpoint is never executed",
    "uvicorn-log-level": "--log-level",
}
"""By name, without the dashes in front."""
