# SPDX-License-Identifier: Apache-2.0
"""Bits of each Linear as AutoRound's AutoScheme chooses them, in AutoRound's own environment.

A scheme's scales are left out of its bits here, so that all candidates with groups of one size
are weighed by their codes alone, and an average keeps to the bytes that a checkpoint has.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

FUSED = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
"""What servers join, and what gets one scheme from both tools."""


def search(job: dict) -> dict:
    """The choices and the seconds that they took.

    Args:
        job: ``model``, a folder; ``texts``, a JSON file with samples; their number ``samples`` and
            ``length`` in tokens; candidates' ``bits`` and their ``group_size``; ``averages``, the
            mean bits of the codes that are wanted.
    """
    from auto_round import AutoScheme  # noqa: PLC0415
    from auto_round.auto_scheme.gen_auto_scheme import GenScheme  # noqa: PLC0415
    from auto_round.schemes import QuantizationScheme  # noqa: PLC0415
    from torch.nn import Linear  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from wide import multiply_in_float32  # noqa: PLC0415

    multiply_in_float32()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    linears = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    names = [name for name in linears if name != "lm_head"]
    options = [
        QuantizationScheme(bits=bits, group_size=job["group_size"], act_bits=16)
        for bits in job["bits"]
    ]
    wanted = AutoScheme(
        avg_bits=list(job["averages"]),
        options=options,
        shared_layers=FUSED,
        ignore_scale_zp_bits=True,
        nsamples=job["samples"],
        seqlen=job["length"],
    )
    started = time.perf_counter()
    generator = GenScheme(
        wanted,
        model,
        names,
        {},
        job["texts"],
        device_map="cpu",
        tokenizer=AutoTokenizer.from_pretrained(job["model"]),
        enable_torch_compile=False,
    )
    found = generator.get_layer_config()
    seconds = time.perf_counter() - started
    choices = {
        str(average): {name: config["bits"] for name, config in chosen.items()}
        for average, chosen in found.items()
    }
    return {"choices": choices, "seconds": seconds}


def main() -> None:
    """Do the job of a file, and write its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, help="JSON file that describes the job")
    parser.add_argument("report", type=Path, help="JSON file to write")
    given = parser.parse_args()
    # what it keeps of a search stays beside the report, and is shared by the averages only
    os.environ["AR_AUTO_SCHEME_CACHE"] = str(given.report.resolve().parent / "scores")
    given.report.write_text(json.dumps(search(json.loads(given.job.read_text()))))


if __name__ == "__main__":
    main()
