"""Checks configurations and GGUF headers in a separate process.

`python -m scripts.hub.check DTYPE DEVICE QUANTIZATION`, with "" for no quantization. The process
loads the model's libraries while the hub is queried. Each input line is a JSON list: the path of a
directory, or of a GGUF file without data, and whether a tokenizer is needed. Each output line is
the reason why the model cannot run, as a JSON string, or null.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path

from protocol.config import ModelConfig, Quantization
from protocol.process.prctl import die_with_parent
from scripts.hub.gguf import check_names
from scripts.hub.messages import is_gguf
from worker_proc.gguf.model_header import read_header
from worker_proc.gguf.parts import part_paths
from worker_proc.startup.early_refusals import refuse_config

_TIMEOUT_S = 60.0


class Checker:
    """Starts the checking process and queries it."""

    def __init__(self, model: ModelConfig) -> None:
        settings = [model.dtype, model.device, model.quantization or ""]
        self._command = [sys.executable, "-P", "-m", "scripts.hub.check", *settings]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process unless it runs; it ends with the current process."""
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe)
        return self._process

    def check(self, path: Path, *, needs_tokenizer: bool = True) -> None:
        """Raise ValueError if a configuration or a GGUF header shows that the model cannot run.

        Without an answer from the process nothing is refused, because the worker checks again.
        Problems that config.json alone shows, or names in a GGUF header, are found in the current
        process, without waiting.
        """
        if is_gguf(path):
            check_names(read_header(*part_paths(path)), needs_tokenizer=needs_tokenizer)
        elif (path / "config.json").is_file():
            refuse_config(str(path))
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([str(path), needs_tokenizer]).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return
        ready, _, _ = select.select([process.stdout], [], [], _TIMEOUT_S)
        if not ready:
            self.stop()  # a late answer would be mistaken for the next one
            return
        answer = process.stdout.readline()
        reason = json.loads(answer or b"null")
        if reason is not None:
            raise ValueError(reason)

    def stop(self) -> None:
        """End the process, to free the memory of its libraries."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # its input was not read
                    pipe.close()
            self._process = None


def main() -> None:
    """Answer until the end of the input."""
    die_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print
    from worker_proc.startup.lean_import import lean_imports

    with lean_imports():
        from scripts.gguf.check import check_headers
        from worker_proc.cuda.device import resolve_device
        from worker_proc.loading.inspection import inspect_config
        from worker_proc.modules.rounding_refusals import check_rounded_dtype
    dtype, device, rounding = sys.argv[1:]
    quantization = Quantization(rounding) if rounding else None
    for line in sys.stdin:
        reason = None
        try:
            path, needs_tokenizer = json.loads(line)
            found = resolve_device(device)
            if is_gguf(path):
                check_headers(
                    Path(path), dtype, found, quantization, needs_tokenizer=needs_tokenizer
                )
            else:
                inspected = inspect_config(path, dtype, found)
                if quantization is not None:
                    check_rounded_dtype(inspected.dtype, quantization)
        except ValueError as error:
            reason = str(error)
        print(json.dumps(reason), file=answers, flush=True)


if __name__ == "__main__":
    main()
