#!/usr/bin/env bash
# Versions: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6.
#
# Behaviour: Cast to FLOAT8E4M3FN with saturate=0 makes NaN of what exceeds 448, as it should, except from 480 to
#   495: these become 448. FLOAT8E5M2 makes NaN of 61440 to 65504 and infinity of what is larger.
# Why it surprises: the result is not monotonic. Who casts without saturation to find overflows by their NaN misses
#   those of one stretch in the middle (480 is 1.111 times 2 to the 8, whose bits are the code of NaN), and
#   an infinity that comes after a NaN looks as if the smaller number had been the invalid one.
# Seen (onnxruntime | the reference evaluator of ONNX):
#   E4M3FN of [464, 470, 480, 490, 495, 496, 600]       448 nan 448 448 448 nan nan | 448 nan nan nan nan nan nan
#   E5M2 of [57344, 61000, 61440, 65504, 65536, 100000]  57344 57344 nan nan inf inf | 57344 57344 inf inf inf inf
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6

"$work/venv/bin/python" - <<'PY'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def cast(name, numbers):
    """Cast to a type of 8 bits and back to float, by both."""
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["small"], to=getattr(TensorProto, "FLOAT8" + name), saturate=0),
            helper.make_node("Cast", ["small"], ["y"], to=TensorProto.FLOAT),
        ],
        "cast",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [len(numbers)])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [len(numbers)])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {"x": np.array(numbers, np.float32)}
    ours, theirs = (" ".join(f"{one:g}" for one in run.run(None, given)[0]) for run in (session, ReferenceEvaluator(model)))
    print(f"{name} of {numbers}  {ours} | {theirs}")
    return ours, theirs


assert cast("E4M3FN", [464, 470, 480, 490, 495, 496, 600]) == (
    "448 nan 448 448 448 nan nan", "448 nan nan nan nan nan nan")
assert cast("E5M2", [57344, 61000, 61440, 65504, 65536, 100000]) == (
    "57344 57344 nan nan inf inf", "57344 57344 inf inf inf inf")
PY
