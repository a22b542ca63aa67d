#!/usr/bin/env bash
# Versions: safetensors 0.8.0, torch 2.13.0, numpy 2.4.6.
#
# Behaviour: safetensors.torch saves a conjugated tensor without its conjugation: the sign of every imaginary part
#   is lost. A real tensor whose sign is pending (the imaginary part of a conjugate) loses it too.
# Why it surprises: torch keeps `conj()` as a mark on the tensor, which nobody sees: it is contiguous, prints, computes
#   and compares with its true values. torch.save and torch's own distributed checkpoints keep it, numpy()
#   refuses such a tensor; here the rotations of a rotary embedding that were saved to be undone turn the other way.
# Seen:
#   rotation 0.5403+0.8415j, conjugated and saved: 0.5403-0.8415j
#   read by safetensors: 0.5403+0.8415j, by torch.load: 0.5403-0.8415j
#   undoing a rotation with what was read is off by 1.6829
#   a real tensor [-2.0] is read as [2.0]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet safetensors==0.8.0 torch==2.13.0 numpy==2.4.6

"$work/venv/bin/python" - <<'PY'
import io

import torch
from safetensors.torch import load, save

turn = torch.polar(torch.ones(4), torch.arange(1.0, 5.0))  # e^(i position), as of a rotary embedding
back = turn.conj()
assert back.is_contiguous() and torch.equal(back.imag, -turn.imag)

read = load(save({"back": back}))["back"]
buffer = io.BytesIO()
torch.save(back, buffer)
buffer.seek(0)
saved_by_torch = torch.load(buffer)
print(f"rotation {turn[0].item():.4f}, conjugated and saved: {back[0].item():.4f}")
print(f"read by safetensors: {read[0].item():.4f}, by torch.load: {saved_by_torch[0].item():.4f}")
assert torch.equal(saved_by_torch, back)
assert torch.equal(read, turn) and not torch.equal(read, back)

query = torch.ones(4, dtype=torch.complex64)
torch.testing.assert_close(query * turn * back, query)
off = (query * turn * read - query).abs()
print(f"undoing a rotation with what was read is off by {off[0].item():.4f}")
assert off.min() > 0.1

negative = torch.tensor([1 + 2j]).conj().imag
assert negative.dtype == torch.float32 and negative.is_contiguous() and negative.tolist() == [-2.0]
read = load(save({"negative": negative}))["negative"]
print("a real tensor", negative.tolist(), "is read as", read.tolist())
assert read.tolist() == [2.0]
PY
