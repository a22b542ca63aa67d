# SPDX-License-Identifier: Apache-2.0
"""The demonstration of a server: with a program in the place of vLLM, which listens and answers."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.support import small_models as small

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SERVER = """#!{python}
import http.server, json, os, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = list(range(asked["max_tokens"]))
        logprobs = {{"token_logprobs": [-0.5 for _ in tokens]}}
        self.answer({{"choices": [{{"token_ids": tokens, "logprobs": logprobs}}]}})
    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
open({pid!r}, "w").write(str(os.getpid()))
given = sys.argv
if {dies!r} in given:
    sys.exit("no kernel")
address = given[given.index("--host") + 1], int(given[given.index("--port") + 1])
http.server.HTTPServer(address, Answers).serve_forever()
"""


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The script, which finds its neighbours by its folder."""
    spec = importlib.util.spec_from_file_location("serve_demo", BENCHMARKS / "serve_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_demo"] = module  # dataclasses look for their module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec.loader.exec_module(module)
    return module


def _server(folder: Path, *, dies: str = "") -> tuple[str, Path]:
    script, pid = folder / "python", folder / "pid"
    script.write_text(SERVER.format(python=sys.executable, pid=str(pid), dies=dies))
    script.chmod(0o755)
    return str(script), pid


def _is_gone(pid: Path) -> bool:
    try:
        os.kill(int(pid.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def test_the_server_answers_and_is_stopped(demo: ModuleType, tmp_path: Path) -> None:
    python, pid = _server(tmp_path)
    with demo.served(python, tmp_path, tmp_path / "log") as address:
        answer = demo.complete(address, "model", [3, 4])
        assert not _is_gone(pid)
    assert answer.tokens == list(range(demo.TOKENS))
    assert _is_gone(pid)


def test_it_is_stopped_after_an_error(demo: ModuleType, tmp_path: Path) -> None:
    python, pid = _server(tmp_path)
    with pytest.raises(KeyError), demo.served(python, tmp_path, tmp_path / "log"):
        raise KeyError
    assert _is_gone(pid)


def test_one_that_ends_is_told_with_its_last_words(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, _ = _server(tmp_path, dies="auto")
    began = time.monotonic()
    with (
        pytest.raises(demo.ServerError, match="did not become healthy"),
        demo.served(python, tmp_path, tmp_path / "log"),
    ):
        pass
    assert time.monotonic() - began < demo._START / 2
    assert "no kernel" in capsys.readouterr().err


def test_it_is_tried_again_in_float16(demo: ModuleType, tmp_path: Path) -> None:
    """Some processors have no bfloat16 that vLLM gets along with."""
    python, pid = _server(tmp_path, dies="auto")
    (answer,) = demo.ask(python, tmp_path, tmp_path / "log", [[3, 4]])
    assert answer.prompt == [3, 4]
    assert _is_gone(pid)


def test_answers_of_another_model_are_told(demo: ModuleType) -> None:
    model, prompt = small.llama(), [3, 4, 5]
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that tokens are not alike
    tokens = model.generate(
        torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False
    )[0, len(prompt) :]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    own = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0].tolist()
    right = demo.compare(model, demo.Completion(prompt, tokens.tolist(), own))
    assert demo.is_sound(right)
    assert right["same"] == 6
    other = [(one + 1) % small.VOCABULARY for one in tokens.tolist()]
    assert not demo.is_sound(demo.compare(model, demo.Completion(prompt, other, own)))
    far = [one - 1 for one in own]
    assert not demo.is_sound(demo.compare(model, demo.Completion(prompt, tokens.tolist(), far)))
