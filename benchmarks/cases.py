# SPDX-License-Identifier: Apache-2.0
"""What ``quality.py`` compares: algorithms by scheme, and which has to beat which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

HEAD = ["lm_head"]
MAGNITUDE = "magnitude"
"""In the place of a modifier: zeros where weights are smallest, without either tool."""
REFERENCE = "reference, "
"""Names of cases that the reference runs begin so."""


@dataclass(frozen=True)
class Case:
    """One algorithm in one setting.

    Attributes:
        setting: the scheme or structure; cases of one setting are compared.
        name: the algorithm; unique in its setting.
        recipe: class name → fields of each modifier, in order.
        data: whether it is calibrated; if not, one seed is all.
        model: ``"embedded"``; ``"planted"``: the same with outlier channels; or the name of one of
            ``second.py``.
        draws: whether it draws at random without data: then each seed is another draw.
        in_memory: whether the model is measured where it was made, since transformers does not
            apply all that the file says.
        unmasked: whether tokens of the calibration see those behind them too.
    """

    setting: str
    name: str
    recipe: dict[str, dict[str, Any]]
    data: bool = True
    model: str = "embedded"
    draws: bool = False
    in_memory: bool = False
    unmasked: bool = False

    @property
    def seeded(self) -> bool:
        """Whether a seed makes a difference."""
        return self.data or self.draws

    @property
    def by_reference(self) -> bool:
        """Whether the reference runs it."""
        return self.name.startswith(REFERENCE)


def grid(bits: int, group: int, *, symmetric: bool = True) -> dict[str, Any]:
    """Integer weights in groups."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group,
    }
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def preset(name: str) -> dict[str, Any]:
    """A preset on all Linears."""
    return {"targets": ["Linear"], "scheme": name}


def rounded(scheme: dict[str, Any], **fields: Any) -> dict[str, dict[str, Any]]:
    """Round-to-nearest."""
    return {"QuantizationModifier": {**scheme, "ignore": HEAD, **fields}}


def solved(scheme: dict[str, Any], **fields: Any) -> dict[str, dict[str, Any]]:
    """GPTQ."""
    return {"GPTQModifier": {**scheme, "ignore": HEAD, **fields}}


def own(name: str, scheme: dict[str, Any], **fields: Any) -> dict[str, dict[str, Any]]:
    """Another modifier that quantizes."""
    return {name: {**scheme, "ignore": HEAD, **fields}}


def sparse(name: str, structure: str, **fields: Any) -> dict[str, dict[str, Any]]:
    """A one-shot pruning modifier: half of the weights."""
    return {
        name: {
            "sparsity": 0.5,
            "mask_structure": structure,
            "targets": ["Linear"],
            "ignore": HEAD,
            **fields,
        }
    }


AWQ = {"AWQModifier": {}}
TUNED = {"ScaleTuningModifier": {}}
SMOOTH = {"SmoothQuantModifier": {"smoothing_strength": 0.8}}
EQUALIZED = {"SmoothQuantModifier": {"algorithm": "log_equalization"}}
OWL = {
    "sparsity_profile": "owl",
    "owl_m": 5,
    "owl_lmbda": 0.08,
    "targets": ["LlamaDecoderLayer"],
}
FELT = ("gradients at outputs", {"gradient_samples": 32})
ALIKE = ("all outputs alike", {"gradient_samples": 0})
EMBEDDED = (
    ("4 bits, group 128", grid(4, 128)),
    ("3 bits, group 64", grid(3, 64)),
    ("2 bits, group 64", grid(2, 64)),
)


def _weights() -> list[Case]:
    cases: list[Case] = []
    for setting, scheme in EMBEDDED:
        cases += [
            Case(setting, "round-to-nearest", rounded(scheme), data=False),
            Case(setting, "mse observer", rounded(scheme, weight_observer="mse"), data=False),
            Case(setting, "imatrix_mse observer", rounded(scheme, weight_observer="imatrix_mse")),
            Case(setting, "GPTQ, one forward", solved(scheme, asymmetric=False)),
            Case(setting, "GPTQ, as it comes", solved(scheme)),
            Case(
                setting,
                "GPTQ, min-max observer",
                solved(scheme, weight_observer="memoryless_minmax"),
            ),
            Case(setting, "GPTQ, mse observer", solved(scheme, weight_observer="mse")),
            Case(setting, "GPTQ and scale tuning", solved(scheme) | TUNED),
            Case(setting, "AWQ", AWQ | rounded(scheme)),
            Case(setting, "AutoRound, 40 steps", own("AutoRoundModifier", scheme, iters=40)),
            Case(setting, "AutoRound", own("AutoRoundModifier", scheme)),
            Case(
                setting, f"{REFERENCE}imatrix_mse", rounded(scheme, weight_observer="imatrix_mse")
            ),
            Case(setting, f"{REFERENCE}GPTQ", solved(scheme)),
            Case(setting, f"{REFERENCE}AutoRound", own("AutoRoundModifier", scheme)),
            *_choices(setting, scheme),
        ]
    asymmetric = preset("W4A16_ASYM")
    cases += [
        Case("W4A16_ASYM", "round-to-nearest", rounded(asymmetric), data=False),
        Case("W4A16_ASYM", "HQQ", own("HQQModifier", asymmetric), data=False),
        Case("W4A16_ASYM", "AWQ", AWQ | rounded(asymmetric)),
        Case(
            "W4A16_ASYM",
            "AWQ, parent's output, no clipping",
            {"AWQModifier": {"loss": "output", "clip": False}} | rounded(asymmetric),
        ),
        Case("W4A16_ASYM", "AWQ and GPTQ", AWQ | solved(asymmetric)),
        Case("W4A16_ASYM", f"{REFERENCE}AWQ", AWQ | rounded(asymmetric)),
    ]
    return cases


def _choices(setting: str, scheme: dict[str, Any]) -> list[Case]:
    """GPTQ as it comes, but for one choice: what is kept has to measure better."""
    return [
        Case(setting, f"GPTQ, {name}", solved(scheme, **fields))
        for name, fields in (
            ("scales not fitted", {"refit_scales": False}),
            ("columns in order", {"actorder": None}),
            ("damping 0.1", {"dampening_frac": 0.1}),
            ("damping 0.001", {"dampening_frac": 0.001}),
            FELT if setting.startswith("4 bits") else ALIKE,
        )
    ]


def _activations() -> list[Case]:
    w8a8, nvfp4 = preset("W8A8"), preset("NVFP4A16")
    return [
        Case("W8A8", "round-to-nearest", rounded(w8a8), data=False),
        Case("W8A8", "GPTQ", solved(w8a8)),
        Case("W8A8", "GPTQ, twin streams", solved(w8a8, asymmetric=True)),
        Case("W8A8", "SmoothQuant and GPTQ", SMOOTH | solved(w8a8)),
        Case(
            "W8A8",
            "SmoothQuant and GPTQ, twin streams",
            SMOOTH | solved(w8a8, asymmetric=True),
        ),
        Case("W8A8", f"{REFERENCE}SmoothQuant and GPTQ", SMOOTH | solved(w8a8)),
        Case("NVFP4A16", "round-to-nearest", rounded(nvfp4), data=False),
        Case("NVFP4A16", "mse observer", rounded(nvfp4, weight_observer="mse"), data=False),
        Case(
            "NVFP4A16",
            "expanded search",
            rounded(nvfp4, weight_observer="nvfp4_expanded_mse"),
            data=False,
        ),
        Case(
            "NVFP4A16",
            f"{REFERENCE}expanded search",
            rounded(nvfp4, weight_observer="nvfp4_expanded_mse"),
            data=False,
        ),
        Case("NVFP4A16", "GPTQ", solved(nvfp4)),
        Case("NVFP4A16", f"{REFERENCE}GPTQ", solved(nvfp4)),
        *(
            Case(name, "round-to-nearest", rounded(preset(name)), data=name == "FP8")
            for name in ("FP8", "FP8_DYNAMIC", "MXFP4A16")
        ),
    ]


def _sparsity() -> list[Case]:
    cases: list[Case] = []
    for setting, structure in (("50 %", "0:0"), ("2:4", "2:4")):
        cases += [
            Case(setting, "magnitude", {MAGNITUDE: {"structure": structure}}, data=False),
            Case(setting, "Wanda", sparse("WandaPruningModifier", structure)),
            Case(setting, "SparseGPT", sparse("SparseGPTModifier", structure)),
            Case(
                setting,
                "SparseGPT, twin streams",
                sparse("SparseGPTModifier", structure, asymmetric=True),
            ),
        ]
    for setting, share in (("60 %", 0.6), ("70 %", 0.7)):
        for name, modifier in (
            ("Wanda", "WandaPruningModifier"),
            ("SparseGPT", "SparseGPTModifier"),
        ):
            pruned = sparse(modifier, "0:0", sparsity=share)
            layered = sparse(modifier, "0:0", sparsity=share, **OWL)
            cases += [Case(setting, name, pruned), Case(setting, f"{name}, OWL", layered)]
    cases += [
        Case("2:4", f"{REFERENCE}Wanda", sparse("WandaPruningModifier", "2:4")),
        Case("2:4", f"{REFERENCE}SparseGPT", sparse("SparseGPTModifier", "2:4")),
        Case(
            "2:4 and W4A16",
            "Wanda, then round-to-nearest",
            sparse("WandaPruningModifier", "2:4") | rounded(preset("W4A16")),
        ),
        Case(
            "2:4 and W4A16",
            "SparseGPT and GPTQ",
            sparse("SparseGPTModifier", "2:4") | solved(preset("W4A16")),
        ),
    ]
    return cases


def _planted() -> list[Case]:
    cases = []
    spin = {"SpinQuantModifier": {"rotations": ["R1", "R2"], "transform_type": "hadamard"}}
    learned = {"SpinQuantModifier": {**spin["SpinQuantModifier"], "learnable": True}}
    smoothing = ("SmoothQuant", "logarithmic equalization")
    few = {
        "W4A16": (*smoothing, *(f"{REFERENCE}{name}" for name in smoothing)),
        "W8A8": ("AWQ", f"{REFERENCE}AWQ"),
    }
    few["W4A4"] = (*few["W4A16"], *few["W8A8"])
    for name in ("W8A8", "W4A16", "W4A4"):
        scheme = preset(name)
        cases += [
            Case(f"planted, {name}", label, recipe, data=data, model="planted")
            for label, recipe, data in (
                ("round-to-nearest", rounded(scheme), False),
                ("SmoothQuant", SMOOTH | rounded(scheme), True),
                ("logarithmic equalization", EQUALIZED | rounded(scheme), True),
                ("AWQ", AWQ | rounded(scheme), True),
                ("SpinQuant", spin | rounded(scheme), False),
                ("SpinQuant, learned", learned | rounded(scheme), True),
                (f"{REFERENCE}SmoothQuant", SMOOTH | rounded(scheme), True),
                (f"{REFERENCE}logarithmic equalization", EQUALIZED | rounded(scheme), True),
                (f"{REFERENCE}AWQ", AWQ | rounded(scheme), True),
                (f"{REFERENCE}SpinQuant", spin | rounded(scheme), False),
            )
            if label not in few[name]
        ]
    return cases


UNMASKED_REAP = "REAP, calibrated without a mask"
"""On the inputs that the reference has: it loses the causal mask of this architecture."""
PLANTED_ONLINE = (("planted", "W4A16"), ("planted", "W8A8"))


def _online() -> list[Case]:
    """Rotations that are applied while the model runs, in memory: transformers leaves them out."""
    quip = {"QuIPModifier": {"rotations": ["v", "u"], "transform_type": "random-hadamard"}}
    schemes = {"W4A16": preset("W4A16"), "W8A8": preset("W8A8"), "2 bits": grid(2, 128)}
    cases = []
    for model, name in (("embedded", "W4A16"), ("embedded", "2 bits"), *PLANTED_ONLINE):
        setting = f"{'planted, ' if model == 'planted' else ''}{name}, in memory"
        scheme = schemes[name]
        plain = Case(
            setting, "round-to-nearest", rounded(scheme), data=False, model=model, in_memory=True
        )
        solved_ = replace(plain, name="GPTQ", recipe=solved(scheme), data=True)
        drawn = replace(plain, name="QuIP", recipe=quip | rounded(scheme), draws=True)
        both = replace(solved_, name="QuIP and GPTQ", recipe=quip | solved(scheme), draws=True)
        cases += [plain, drawn, replace(drawn, name=f"{REFERENCE}QuIP")]
        cases += [solved_, both] if name != "W8A8" else []
    return cases


def _mixture() -> list[Case]:
    """Experts: which of them go, and how well the others are rounded (``second.py``)."""
    scheme = grid(3, 64)
    unrouted = ["re:.*gate$"]
    cases = [
        Case(
            f"mixture, {words} of the experts",
            name,
            {"REAPPruningModifier": {"sparsity": share}},
            unmasked=name == UNMASKED_REAP,
        )
        for words, share in (("a quarter", 0.25), ("half", 0.5))
        for name in ("REAP", UNMASKED_REAP, f"{REFERENCE}REAP")
    ]
    cases += [
        Case("mixture, 3 bits, group 64", name, recipe, data=data)
        for name, recipe, data in (
            ("round-to-nearest", rounded(scheme), False),
            ("GPTQ, one forward", solved(scheme, asymmetric=False), True),
            ("GPTQ, as it comes", solved(scheme), True),
            (f"{REFERENCE}GPTQ", own("GPTQModifier", scheme, ignore=HEAD + unrouted), True),
        )
    ]
    return [replace(case, model="mixture") for case in cases]


def _second() -> list[Case]:
    """What GPTQ does beyond the sweep, on a model of another architecture (``second.py``)."""
    cases = []
    for setting, scheme in EMBEDDED:
        cases += [
            Case(setting, name, recipe, data=data)
            for name, recipe, data in (
                ("round-to-nearest", rounded(scheme), False),
                ("mse observer", rounded(scheme, weight_observer="mse"), False),
                ("GPTQ, one forward", solved(scheme, asymmetric=False), True),
                ("GPTQ, as it comes", solved(scheme), True),
                ("GPTQ, mse observer", solved(scheme, weight_observer="mse"), True),
                ("AWQ", AWQ | rounded(scheme), True),
                (f"{REFERENCE}GPTQ", solved(scheme), True),
                (f"{REFERENCE}AWQ", AWQ | rounded(scheme), True),
            )
        ]
        cases += _choices(setting, scheme)
    return [
        replace(case, setting=f"second model, {case.setting}", model="second") for case in cases
    ]


CASES = _weights() + _activations() + _sparsity() + _planted() + _online() + _mixture() + _second()

# In a setting, what must be below what, and by which share of the other at the most.
BETTER: list[tuple[str, str, str, float]] = [
    *(
        (setting, better, worse, 1.0)
        for setting, _ in EMBEDDED
        for better, worse in (
            ("mse observer", "round-to-nearest"),
            ("AWQ", "round-to-nearest"),
            ("GPTQ, as it comes", "round-to-nearest"),
            ("GPTQ and scale tuning", "GPTQ, as it comes"),
            ("AutoRound, 40 steps", "round-to-nearest"),
            ("AutoRound", "round-to-nearest"),
            ("AutoRound", f"{REFERENCE}AutoRound"),
            ("imatrix_mse observer", f"{REFERENCE}imatrix_mse"),
            ("GPTQ, one forward", f"{REFERENCE}GPTQ"),
            ("GPTQ, as it comes", f"{REFERENCE}GPTQ"),
        )
    ),
    ("4 bits, group 128", f"GPTQ, {FELT[0]}", "GPTQ, as it comes", 1.0),
    ("3 bits, group 64", "GPTQ, as it comes", f"GPTQ, {ALIKE[0]}", 1.0),
    ("2 bits, group 64", "GPTQ, as it comes", f"GPTQ, {ALIKE[0]}", 1.0),
    ("W4A16_ASYM", "HQQ", "round-to-nearest", 1.0),
    ("W4A16_ASYM", "AWQ", "round-to-nearest", 1.0),
    ("W4A16_ASYM", "AWQ", f"{REFERENCE}AWQ", 0.75),
    ("W8A8", "SmoothQuant and GPTQ", f"{REFERENCE}SmoothQuant and GPTQ", 1.0),
    ("NVFP4A16", "mse observer", "round-to-nearest", 1.0),
    ("NVFP4A16", "expanded search", "mse observer", 1.0),
    ("NVFP4A16", "expanded search", f"{REFERENCE}expanded search", 1.0),
    ("NVFP4A16", "GPTQ", f"{REFERENCE}GPTQ", 1.0),
    *(
        (share, f"{name}, OWL", name, 1.0)
        for share in ("60 %", "70 %")
        for name in ("Wanda", "SparseGPT")
    ),
    ("50 %", "Wanda", "magnitude", 1.0),
    ("50 %", "SparseGPT", "Wanda", 1.0),
    ("2:4", "Wanda", "magnitude", 1.0),
    ("2:4", "SparseGPT", "Wanda", 1.0),
    ("2:4", "Wanda", f"{REFERENCE}Wanda", 1.0),
    ("2:4", "SparseGPT", f"{REFERENCE}SparseGPT", 0.75),
    ("2:4", "SparseGPT, twin streams", f"{REFERENCE}SparseGPT", 0.75),
    ("2:4 and W4A16", "SparseGPT and GPTQ", "Wanda, then round-to-nearest", 1.0),
    ("planted, W8A8", "SmoothQuant", "round-to-nearest", 1.0),
    ("planted, W8A8", "logarithmic equalization", "round-to-nearest", 1.0),
    ("planted, W8A8", "SpinQuant", "round-to-nearest", 1.0),
    ("planted, W4A16", "AWQ", "round-to-nearest", 1.0),
    ("planted, W4A16", "SpinQuant", "round-to-nearest", 1.0),
    ("planted, W4A16", "SpinQuant, learned", "SpinQuant", 1.0),
    ("planted, W4A4", "SpinQuant", "round-to-nearest", 1.0),
    ("planted, W4A4", "SpinQuant, learned", "SpinQuant", 1.0),
    *(
        ("planted, W8A8", name, f"{REFERENCE}{name}", 1.0)
        for name in ("SmoothQuant", "logarithmic equalization")
    ),
    ("planted, W4A16", "AWQ", f"{REFERENCE}AWQ", 1.0),
    ("planted, W4A4", "SpinQuant", f"{REFERENCE}SpinQuant", 1.0),
    ("planted, W8A8", "SpinQuant", f"{REFERENCE}SpinQuant", 1.0),
    ("planted, W4A16", "SpinQuant", f"{REFERENCE}SpinQuant", 1.0),
    *(
        (f"{name}, in memory", "QuIP", worse, 1.0)
        for name in ("W4A16", "2 bits", "planted, W4A16", "planted, W8A8")
        for worse in ("round-to-nearest", f"{REFERENCE}QuIP")
    ),
    *(
        (f"{name}, in memory", "QuIP and GPTQ", "GPTQ", 1.0)
        for name in ("W4A16", "2 bits", "planted, W4A16")
    ),
    *(
        (f"mixture, {words} of the experts", name, f"{REFERENCE}REAP", 1.0)
        for words in ("a quarter", "half")
        for name in ("REAP", UNMASKED_REAP)
    ),
    *(
        ("mixture, 3 bits, group 64", better, f"{REFERENCE}GPTQ", 1.0)
        for better in ("GPTQ, one forward", "GPTQ, as it comes")
    ),
    *(
        (f"second model, {setting}", better, worse, 1.0)
        for setting, _ in EMBEDDED
        for better, worse in (
            ("mse observer", "round-to-nearest"),
            ("AWQ", "round-to-nearest"),
            ("GPTQ, as it comes", "round-to-nearest"),
            ("GPTQ, mse observer", "round-to-nearest"),
            ("GPTQ, as it comes", f"{REFERENCE}GPTQ"),
            ("AWQ", f"{REFERENCE}AWQ"),
        )
    ),
]
# What a mean must not exceed, in nats per token.
LIMITS = {
    ("4 bits, group 128", "GPTQ, as it comes"): 0.0105,
    ("3 bits, group 64", "GPTQ, as it comes"): 0.037,
    ("2 bits, group 64", "GPTQ, as it comes"): 0.25,
}
