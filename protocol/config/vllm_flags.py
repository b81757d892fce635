"""Flags of vLLM that this engine does not have, with what takes their place."""

_GRAPHS = "decode steps are CUDA graphs, and --enforce-eager switches them off"
_GRAMMARS = "grammars need no flag"
_KIND = "a model's kind is read from its files"
_MACHINES = "engines of other machines join at --agents-listen, as replicas"
_ONE_MACHINE = f"the ranks of a model share a machine; {_MACHINES}"
_TEXT_ONLY = "only text is served"
INSTEAD = {
    "async-scheduling": "--max-steps-in-flight is 2 by default",
    "chat-template-content-format": "the format is read from the template",
    "compilation-config": _GRAPHS,
    "cuda-graph-sizes": _GRAPHS,
    "data-parallel-address": _MACHINES,
    "data-parallel-backend": "--ray places engines in a cluster",
    "data-parallel-rank": _MACHINES,
    "data-parallel-rpc-port": _MACHINES,
    "data-parallel-size-local": _MACHINES,
    "data-parallel-start-rank": _MACHINES,
    "disable-log-requests": "--access-log off leaves out the lines of requests",
    "disable-log-stats": "--log-level warning leaves out the lines of statistics",
    "disable-uvicorn-access-log": "--access-log off leaves out the lines of requests",
    "distributed-executor-backend": "--ray places engines in a cluster",
    "enable-auto-tool-choice": "tools need no flag; --tool-call-parser names the format",
    "enable-log-requests": "--access-log chooses the lines of requests",
    "enable-prompt-tokens-details": "usage always has them",
    "enable-reasoning": "reasoning needs no flag; --reasoning-parser names the format",
    "enable-server-load-tracking": "GET /load needs no flag",
    "enable-sleep-mode": "--enable-admin-routes has POST /sleep",
    "guided-decoding-backend": _GRAMMARS,
    "headless": "--no-api starts no HTTP server",
    "hf-token": "the variable HF_TOKEN is read",
    "kv-events-config": "--enable-kv-events",
    "kv-transfer-config": "--kv-offload-bytes and --kv-offload-dir keep KV blocks",
    "limit-mm-per-prompt": _TEXT_ONLY,
    "load-format": "the format is read from the files",
    "master-addr": _ONE_MACHINE,
    "master-port": _ONE_MACHINE,
    "max-log-len": "no text of a request is logged",
    "max-logprobs": "a request may ask for 20",
    "max-seq-len-to-capture": _GRAPHS,
    "mm-processor-kwargs": _TEXT_ONLY,
    "nnodes": _ONE_MACHINE,
    "node-rank": _ONE_MACHINE,
    "override-generation-config": "requests have these parameters",
    "runner": _KIND,
    "speculative-config": "--num-speculative-tokens and --speculative-model",
    "ssl-cert-reqs": "with --ssl-ca-certs every client needs a certificate",
    "structured-outputs-config": _GRAMMARS,
    "swap-space": "--swap-space-bytes takes bytes",
    "task": _KIND,
    "trust-remote-code": "code from a checkpoint is never executed",
    "uvicorn-log-level": "--log-level",
}
"""What replaces a flag of vLLM; keys are flags without their dashes."""
OTHER_VALUES = {"quantization": "the format of a quantized checkpoint needs no flag"}
"""What takes the place of vLLM's values that a setting of this engine does not have."""
