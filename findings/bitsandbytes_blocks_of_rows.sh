#!/usr/bin/env bash
# Versions: bitsandbytes 0.50.2, torch 2.13.0, numpy 2.4.6. Tried on processors with AVX-512 only.
#
# Behaviour: quantize_4bit cuts a matrix into blocks of 64 values one after another, across the ends of rows. On a CPU
#   dequantize_4bit counts the blocks of each row anew. Where 64 does not divide the width, values are multiplied by
#   the scale of another block. A Linear4bit with such a number of inputs computes with what comes out of that.
# Why it surprises: both are one library, without an error or a warning; codes and scales are right (the same bytes
#   taken as a vector come back right), and so is a width of 64 or 128. Rows of like size hide it, for the scales
#   of neighbours are alike then.
# Seen (errors of a value by the largest of its block):
#   width 128, as a matrix 0.12, as a vector 0.12
#   width  96, as a matrix 10.68, as a vector 0.15
#   Linear4bit, 96 inputs: rows of its output are up to 9.9 times what they should be
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet bitsandbytes==0.50.2 torch==2.13.0 numpy==2.4.6

"$work/venv/bin/python" - <<'PY'
import copy

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn import LinearNF4

torch.manual_seed(0)


def worst(read, weight):
    error, size = ((one.reshape(-1, 64).abs().amax(1)) for one in (read - weight, weight))
    return (error / size).max().item()


for width in (128, 96):
    weight = torch.randn(4, width) * 10.0 ** -torch.arange(4.0)[:, None]
    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    flat = copy.copy(state)
    flat.shape = torch.Size([weight.numel()])
    matrix, vector = dequantize_4bit(codes, state), dequantize_4bit(codes, flat).view_as(weight)
    errors = worst(matrix, weight), worst(vector, weight)
    print(f"width {width:3}, as a matrix {errors[0]:.2f}, as a vector {errors[1]:.2f}")
    assert errors[1] < 0.16 and (errors[0] < 0.16 if width == 128 else errors[0] > 1)

layer = LinearNF4(96, 4, bias=False, compress_statistics=False, compute_dtype=torch.float32)
layer.load_state_dict({"weight": weight})
layer.to("cpu")
assert torch.equal(layer.weight.data.flatten(), codes.flatten())
with torch.no_grad():
    rows = layer(torch.eye(96)).T
times = (rows.norm(dim=1) / vector.norm(dim=1)).max().item()
print(f"Linear4bit, 96 inputs: rows of its output are up to {times:.1f} times what they should be")
assert times > 2
PY
