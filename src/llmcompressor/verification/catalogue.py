# SPDX-License-Identifier: Apache-2.0
"""Every rule as a line: its number, who demands it, how bad a breach is, what decides it.

``python -m llmcompressor.verification.catalogue`` prints the table of the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcompressor.verification.facts import Severity

VERSIONS = {
    "vllm": "0.33",
    "transformers": "5.22",
    "sglang": "0.5",
    "llama.cpp": "of August 2026",
}
"""The releases whose rules these are."""
_NAMES = {
    "vllm": "vLLM",
    "transformers": "transformers",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
}


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        number: as in the specification of servers (``S30``), or the verifier's own (``F1``).
        server: whose rule it is; empty if it is about files as such.
        severity: of a breach, unless the breach says otherwise.
        is_limit: the checkpoint is sound and this server alone cannot serve it; unless that
            server is asked about, a breach is a warning.
        decided: what has to be known to decide it.
        title: what it demands.
    """

    number: str
    server: str
    severity: Severity
    is_limit: bool
    decided: str
    title: str


_TABLE = """
F1 |  | error | files | config.json is there and is JSON
F2 |  | error | files | the index is there and is JSON
F3 |  | error | files | every shard is there and whole
F4 |  | error | files | headers are sane: known dtypes, sizes that fit, no gap and no overlap
F5 |  | error | files | every tensor of the index is in the shard that it names
F6 |  | error | files | no tensor and no shard is left over
F7 |  | error | files | no tensor is in two shards
F8 |  | error | files | the index's total is that of the tensors
M1 |  | error | the manifest | manifest.json can be read
M2 |  | error | the manifest | tensors are as the run wrote them
M3 |  | error | the manifest | weight files are those of the run, with their headers
M4 |  | warning | the manifest | config.json and the files beside it are as the run wrote them
C1 |  | error | headers | tensors have the shapes of their scheme
C2 |  | error | headers, by transformers | tensors have the shapes and dtypes of the class
C4 |  | error | configuration | schemes are those that their formats hold
C5 |  | error | headers, by transformers | the class of config.json can be built
C6 |  | error | headers, by transformers | the class takes what is stored
C7 |  | note | configuration | all readers find the base of positions
V1 |  | error | all data | scales are not an untouched buffer
V2 |  | error | all data | zero points and codes are in range and were calculated
V3 |  | error | all data | unused bits of packed words are zero
V4 |  | error | all data | codes were written
V5 |  | warning | all data | scales use the range of the codes
V6 |  | error | all data | plain tensors are finite
V7 |  | warning | all data | embeddings, heads and norms are not zero throughout
R1 |  | error | the original | every tensor of the original is accounted for
R2 |  | warning | the original | nothing was added to the original
R3 |  | error | the original | decoded weights are as near as their grid allows
R4 |  | error | the original | what is not quantized is unchanged
R5 |  | error | the original | tied embeddings stay tied, or both are there
R6 |  | warning | the original | config.json and the files beside it are those of the original
S1 |  | error | headers | the configuration is found and names its method
S2 | vllm | error | configuration | groups are dicts with targets and weights
S3 | vllm | error | configuration | arguments are those of compressed-tensors
S4 | vllm | error | configuration | ignore is a list
S5 | vllm | error | configuration | no sparse format
S6 | vllm | error | configuration | no stored activation order
S7 | vllm | error | configuration | each group has its format
S8 | vllm | error | configuration | integer weights alone are packed
S9 | vllm | error | configuration | a target stands in one group
S10 | vllm | error | deployment | device and dtype can be served
S12 | vllm | error | configuration | patterns are regular expressions that match in a moment
S13 | vllm | error | headers | both orders of precedence choose one scheme
S14 | vllm | error | headers | shards of a joined module have one scheme
S16 | vllm | error | headers | all shards of a joined module are ignored, or none
S19 | vllm | error | headers | selected modules are quantized, no others
S20 | vllm | error | headers | what vLLM builds plain is plain
S21 | vllm | error | headers | the scheme is one that vLLM serves
S22 | vllm | note | deployment | what vLLM computes instead
S23 | vllm | error | headers | no tensor beyond those of the scheme
S27 | vllm | warning | all data | integers are offset by half their range
S28 | vllm | error | small tensors | weight_shape is true
S29 | vllm | error | small tensors | global scales are divisors
S30 | vllm | error | small tensors | joined modules share global scales
S32 | vllm | error | small tensors | joined modules share static INT8 inputs
S33 | vllm | error | small tensors | scales fit float16
S34 | vllm | note | configuration | blocks are 128 by 128
S36 | vllm | error | headers | tensors fit the rows that are joined on disk or reordered
S38 | vllm | error | headers | dtypes are those of the scheme
S39 | vllm | error | deployment | shards hold whole groups
S40 | vllm | error | deployment | shards end at whole words
S41 | vllm | error | deployment | shards hold whole blocks
S42 | vllm | error | deployment | shards hold whole groups of floats
S43 | vllm | error | deployment | heads and sizes divide
S44 | vllm | error | deployment | weight-only integers have a kernel
S45 | vllm | error | deployment | 8-bit floats have a kernel
S46 | vllm | error | deployment | 8-bit integers have a kernel
S47 | vllm | error | deployment | 4-bit floats have a kernel
S48 | vllm | error | deployment | 4-bit integers with float inputs have a kernel
S49 | vllm | error | configuration | the cache's scheme is served
S50 | vllm | warning | headers | stored scales of the cache have a scheme
S51 | vllm | error | headers | scales of the cache have accepted names
S52 | vllm | error | headers | scales of the cache have accepted shapes
S53 | vllm | error | deployment | scales per head have groups and a backend
S54 | vllm | error | headers | scales of the cache are there
S55 | vllm | warning | headers | latent attention has no scales
S57 | vllm | error | headers | embeddings are packed integers
S58 | vllm | error | headers | router gates stay plain and ignored
S59 | vllm | error | headers | a quantized head is served
S60 | vllm | error | headers | tied embeddings stay plain
S61 | vllm | error | headers | draft layers are there and ignored
S62 | vllm | error | headers | experts of a layer have one scheme
S63 | vllm | error | headers | experts have a scheme that is served
S64 | vllm | error | deployment | integer experts divide
S65 | vllm | error | deployment | float experts divide
S67 | vllm | error | small tensors | gate and up share scales
S68 | vllm | error | headers | all experts are there, each as large as the others
S69 | vllm | error | headers | quantized experts are stored one by one
S70 |  | error | headers | no tensor of a scheme is missing; no module is missing
S72 | vllm | error | all data | scales are finite and positive
S73 | vllm | error | configuration | transforms have known keys and places
S74 | vllm | error | headers | online transforms are on plain Linears
S75 | vllm | error | deployment | transforms need one device, no bias, whole inputs
S76 | vllm | error | headers | transforms have their tensors
S77 | transformers | limit | headers | transformers applies no transforms
T1 | transformers | error | trial load | the configuration is accepted
T2 | transformers | error | headers | quantization_status is compressed
T4 | transformers | error | trial load | no weight is initialized at random
T5 | transformers | error | trial load | quantized modules are found
T6 | transformers | limit | trial load | experts are restored
L1 | transformers | limit | trial load | embeddings are not packed
L2 | transformers | limit | trial load | weights that initialization names are not packed
L3 | transformers | warning | headers | encoders are unpacked before they run
L4 | transformers | limit | trial load | weights have the dtype of the model
L5 | transformers | limit | headers | attention that is rounded with zero points computes in float16
L6 | transformers | limit | headers | columns are whole groups
L7 | transformers | limit | trial load | keys and values that are rounded have scales
L8 | transformers | limit | headers | what is tied is quantized alike
L9 | transformers | limit | trial load | tensors have the shape of their place
L10 | transformers | limit | trial load | tables of the class convert what is stored
L11 | transformers | limit | trial load | states that are to be rounded are
G1 | sglang | limit | headers | classes before joined shards choose the same
G2 | sglang | limit | headers | what is unquantized is ignored
G3 | sglang | limit | headers | shards are ignored together
G4 | sglang | limit | headers | embeddings stay plain
G5 | sglang | limit | headers | Linears have a scheme that is served, no rotation in the forward
G6 | sglang | limit | headers | experts have a scheme that is served
G7 | sglang | limit | headers | heads and caches are served
Q1 | llama.cpp | error | configuration | one group, with its arguments in full
Q2 | llama.cpp | error | headers | the converter unpacks the scheme
Q3 | llama.cpp | error | headers | each tensor has a place in GGUF
Q4 | llama.cpp | error | headers | columns are whole groups
Q5 | llama.cpp | note | headers | what llama.cpp computes instead
"""


def _rule(line: str) -> Rule:
    number, server, severity, decided, title = (cell.strip() for cell in line.split("|"))
    is_limit = severity == "limit"
    return Rule(
        number, server, Severity("error" if is_limit else severity), is_limit, decided, title
    )


RULES = {rule.number: rule for rule in map(_rule, _TABLE.strip().splitlines())}
"""Number → rule, of all that are checked."""
_SELECTED = "What a target selects in vLLM is found by its own procedure: S19 tells what is wrong."
_SHAPES = "A shape that differs from that of the scheme is C1."
NOT_CHECKED = {
    "S11": _SELECTED,
    "S15": _SELECTED,
    "S17": "Data for others: the table of families that S14, S16 and S68 use.",
    "S18": _SELECTED,
    "S18a": _SELECTED,
    "S24": _SHAPES,
    "S25": _SHAPES,
    "S26": _SHAPES,
    "S31": "Servers handle it: shards of FP8 tensors are requantized to the largest scale.",
    "S35": "A bias of another shape or dtype is C1, or C2 where nothing is quantized.",
    "S37": "A scale of another name is a missing one (S70) and a stray one (S23).",
    "S56": "Says what is left out: attention groups are skipped, which S2 allows for.",
    "S66": _SHAPES,
    "S71": "An unknown tensor of a module is S23; one that the class has no place for is C6.",
    "T3": "Says when transformers decompresses; nothing in a checkpoint can breach it.",
    "T7": "The same facts as S77 and S5, which are checked.",
    "G8": "The same settings as S5 and S6, which are checked.",
}
"""Number in the specification of servers → why nothing is checked under it."""


def markdown() -> str:
    """The rules as a table of Markdown, and what is not checked as a second one."""
    rows = ["| rule | what it demands | who | a breach is | decided by |", "|---|---|---|---|---|"]
    for rule in RULES.values():
        who = f"{_NAMES[rule.server]} {VERSIONS[rule.server]}" if rule.server else "any reader"
        breach = "error where asked for" if rule.is_limit else rule.severity.value
        rows.append(f"| {rule.number} | {rule.title} | {who} | {breach} | {rule.decided} |")
    rows += ["", "| number | why nothing is checked under it |", "|---|---|"]
    rows += [f"| {number} | {why} |" for number, why in NOT_CHECKED.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
