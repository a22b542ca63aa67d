# SPDX-License-Identifier: Apache-2.0
"""Capture of module outputs in a forward, and the teacher's forward, stopped early if possible."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter
from transformers import TrainingArguments

from llmcompressor.args.parsing import current_name
from llmcompressor.core.state import State
from llmcompressor.errors import ArgumentError, InputError, RecipeError, TargetError, did_you_mean
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.matching import match_named_modules, suggest_targets
from llmcompressor.modeling.weights import embeddings
from llmcompressor.numerics import distillation as functions
from llmcompressor.numerics.distillation import mean_of_rows, mean_over_tokens
from llmcompressor.numerics.straight_through import with_zero_gradients
from llmcompressor.observers.tokens import num_batch_tokens

# Keys of a batch that are for the loss only; the teacher computes none.
_FOR_THE_LOSS = {"labels", "shift_labels", "num_items_in_batch", "return_loss"}


class _StopForwardError(Exception):
    """Raised to stop a forward at the last module that is needed."""


class OutputCapture:
    """The latest output of each of some modules, captured while it is open.

    :meth:`keep` is the forward hook to register on them.

    Args:
        modules: module → its name in messages.
        role: ``student`` or ``teacher``, for messages.
        offload: keep the outputs in main memory.

    Attributes:
        calls: number of outputs captured since it was opened.
    """

    def __init__(self, modules: Mapping[Module, str], role: str, offload: bool = False) -> None:
        self.modules = dict(modules)
        self.is_open = False
        self.stops = False
        self._role = role
        self._offload = offload
        # With the version counter, which torch increments on every in-place change.
        self._kept: dict[Module, tuple[Tensor, int]] = {}
        self.calls = 0

    def open(self) -> None:
        """Start capturing; free earlier outputs."""
        self._kept.clear()
        self.calls, self.is_open = 0, True

    def close(self) -> None:
        """Stop capturing, and free the outputs."""
        self._kept.clear()
        self.is_open = self.stops = False

    @property
    def complete(self) -> bool:
        """Return True if every module has produced an output."""
        return len(self._kept) == len(self.modules)

    def keep(self, module: Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: capture the output of a module."""
        if not self.is_open:
            return
        tensor = main_tensor(output)
        if tensor is None:
            return
        kept = self._kept.get(module)
        if kept is not None and kept[0].requires_grad and not tensor.requires_grad:
            return  # another forward without gradients, for a trainer's metrics
        if self._offload:
            tensor = tensor.to("cpu")
        self._kept[module] = (tensor, tensor._version)
        self.calls += 1
        if self.stops and self.complete:
            raise _StopForwardError

    def of(self, module: Module) -> Tensor:
        """The captured output of a module.

        Raises:
            InputError: there is none, or it was changed in place since.
        """
        name = f"{self.modules[module]} of the {self._role}"
        tensor, version = self._kept.get(module, (None, 0))
        if tensor is None:
            raise InputError(
                f"{name} gave no tensor in this batch: it was not called.",
                "Compare modules that the forward calls, and send batch_start before the "
                "forward, loss_calculated after it. A head is not called by trainers that compute "
                "the loss from its weight, as TRL's SFTTrainer does: derive from it a class with "
                "compute_loss = transformers.Trainer.compute_loss, or name other targets.",
            )
        if tensor._version != version:
            raise InputError(
                f"The output of {name} is changed in place by what comes after it.",
                "Compare the output of another module, for instance that of the next one.",
            )
        return tensor


def main_tensor(output: Any) -> Tensor | None:
    """The main tensor of a module's output: the logits, else its first tensor."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        logits = output.get("logits")
        if isinstance(logits, Tensor):
            return logits
        output = list(output.values())
    if isinstance(output, list | tuple):
        return next((each for each in output if isinstance(each, Tensor)), None)
    return None


# ---- the teacher's forward


@torch.no_grad()
def run_teacher(teacher: Module, batch: Any, outputs: OutputCapture, *, may_stop: bool) -> None:
    """Run the teacher on a batch, in evaluation mode, without a cache and without a loss.

    Args:
        teacher: the model; ``outputs.keep`` is a hook on its modules.
        batch: the student's batch.
        outputs: opened here.
        may_stop: stop the forward at the last module that is needed.
    """
    if teacher.training:
        teacher.eval()
    args, kwargs = _teacher_inputs(teacher, batch)
    outputs.open()
    outputs.stops = may_stop
    try:
        teacher(*args, **kwargs)
    except _StopForwardError:
        pass
    finally:
        outputs.stops = False


def _teacher_inputs(teacher: Module, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    # Offloaded weights are on the meta device; their loading hooks move the inputs too.
    devices = (each.device for each in teacher.parameters() if not each.is_meta)
    device = next(devices, torch.device("cpu"))
    if not isinstance(batch, Mapping):
        values = batch if isinstance(batch, list | tuple) else [batch]
        return [one.to(device) if isinstance(one, Tensor) else one for one in values], {}
    accepted = inspect.signature(teacher.forward).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    # An encoder-decoder model derives the decoder's inputs from the labels.
    encoder_decoder = getattr(getattr(teacher, "config", None), "is_encoder_decoder", False)
    unwanted = _FOR_THE_LOSS - ({"labels"} if encoder_decoder else set())
    kwargs = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
        if name not in unwanted and (anything or name in accepted)
    }
    if "use_cache" in accepted or (anything and hasattr(teacher, "config")):
        kwargs["use_cache"] = False
    return [], kwargs


# ---- rows of real tokens


def token_rows(output: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Flatten an output to rows; also return the indices of the real tokens.

    Args:
        output: ``[B, T, D]`` or ``[B · T, D]``; another layout has no token positions, so all of
            its rows count.
        mask_BT: true (or 1) for real tokens; ``None``: all are.

    Returns:
        ``[R, D]``, and the rows that count as int64 ``[N]``, ``None`` for all of them.
    """
    rows_RD = output.reshape(-1, output.shape[-1])
    if mask_BT is None or mask_BT.ndim != 2:
        return rows_RD, None
    flat = output.ndim == 2 and len(output) == mask_BT.numel()
    if output.shape[:-1] != mask_BT.shape and not flat:
        return rows_RD, None
    rows_N = (mask_BT.flatten() == 1).nonzero().squeeze(1)
    if len(rows_N) == len(rows_RD):
        return rows_RD, None
    return rows_RD, rows_N.to(output.device)


def has_other_hooks(modules: Iterable[Module], ours: OutputCapture) -> bool:
    """Return True if other hooks need outputs of the same forward, so it may not stop early."""
    hooks = sum(len(module._forward_hooks) for module in modules)
    return hooks > len(ours.modules)


# --------------------
# Pairing of student and teacher modules, with a check of their widths.

Target = str | tuple[str, str]
"""A pattern for both models, or one for the student and one for the teacher."""


@dataclass(frozen=True)
class Pair:
    """A module of the student and the teacher module that it learns from."""

    student_name: str
    student: Module
    teacher_name: str
    teacher: Module

    @property
    def label(self) -> str:
        """Name of the pair in metrics and messages."""
        return self.student_name or type(self.student).__name__


def pair_modules(student: Module, teacher: Module, targets: Sequence[Target] | None) -> list[Pair]:
    """Pair the modules that the targets match, in the order of the targets and of the models.

    Args:
        student: the model that is trained.
        teacher: the model that it learns from.
        targets: default: the output heads, whose outputs are the logits.

    Raises:
        TargetError: a target matches nothing, or different numbers of modules in the two models.
    """
    if targets is None:
        return [Pair(*_named_head(student, "student"), *_named_head(teacher, "teacher"))]
    pairs: dict[tuple[str, str], Pair] = {}
    for target in targets:
        ours, theirs = (target, target) if isinstance(target, str) else target
        found, aims = (
            _matching_modules(student, ours, "student"),
            _matching_modules(teacher, theirs, "teacher"),
        )
        if len(found) != len(aims):
            raise TargetError(
                f"The layers do not pair: {ours!r} matches {_listed(found)} of the student, "
                f"{theirs!r} {_listed(aims)} of the teacher.",
                "Give a pair [student, teacher] of targets that match as many modules of each, "
                "for instance every second layer of a teacher that is twice as deep.",
            )
        for (name, module), (aim_name, aim) in zip(found, aims, strict=True):
            pairs.setdefault((name, aim_name), Pair(name, module, aim_name, aim))
    return list(pairs.values())


def _matching_modules(model: Module, target: str, role: str) -> list[tuple[str, Module]]:
    found = list(match_named_modules(model, target))
    if not found:
        raise TargetError(
            f"The target {target!r} matches no module of the {role} ({type(model).__name__}).",
            suggest_targets(model, target),
        )
    return found


def _named_head(model: Module, role: str) -> tuple[str, Module]:
    head = embeddings(model)[1]
    for name, module in model.named_modules():
        if head is not None and module is head:
            return name, module
    raise TargetError(
        f"The {role} ({type(model).__name__}) does not say which module gives its logits.",
        'Name it: targets: ["re:.*lm_head$"].',
    )


def _listed(found: Sequence[tuple[str, Module]]) -> str:
    ends = found[0][0] if len(found) == 1 else f"{found[0][0]} … {found[-1][0]}"
    return f"{len(found)} module{'s' * (len(found) > 1)} ({ends})"


# ---- widths


def output_width(model: Module, module: Module) -> int | None:
    """Number of features of a module's output, ``None`` if unknown before it runs."""
    if isinstance(module, Embedding):
        return module.embedding_dim
    features = getattr(module, "out_features", None)
    if isinstance(features, int):
        return features
    if module in find_blocks(model):
        config = getattr(model, "config", None)
        find = getattr(config, "get_text_config", None)
        width = getattr(config if find is None else find(), "hidden_size", None)
        return width if isinstance(width, int) else None
    return None


def check_widths(student: Module, teacher: Module, pairs: Sequence[Pair]) -> None:
    """Refuse pairs whose outputs have different known widths.

    Raises:
        TargetError: the first such pair.
    """
    for pair in pairs:
        ours, theirs = output_width(student, pair.student), output_width(teacher, pair.teacher)
        if ours is None or theirs is None or ours == theirs:
            continue
        heads = (embeddings(student)[1] is pair.student, embeddings(teacher)[1] is pair.teacher)
        if any(heads):
            raise TargetError(
                f"The student has a vocabulary of {ours} ({pair.student_name}), the teacher one "
                f"of {theirs} ({pair.teacher_name}): their logits cannot be compared.",
                "Take a teacher with the student's tokenizer; where only the padding of the "
                "vocabulary differs, call teacher.resize_token_embeddings.",
            )
        raise TargetError(
            f"{pair.student_name} of the student gives {ours} features, {pair.teacher_name} of "
            f"the teacher {theirs}.",
            "Set projection: linear, which learns a map from one to the other, or compare the "
            "logits.",
        )


# --------------------
# Learned projections from the student's features to the teacher's.
#
# They are parameters of the student's modules during training, so that the optimizer, the gradient
# clipping and the checkpoints of a Trainer include them; they are removed afterwards.
#
# They are applied in the loss, outside of the student's forward. Data parallel training searches
# the graph of the forward's outputs for parameters without a gradient: it would count the
# projections among them, or wait for their gradients while distillation is inactive. So the output
# of the student's body is connected to the projections with gradients of zero.

_NAME = "distillation_projection"
_KINDS = ("identity", "linear")


def check_projection(kind: str | None, arguments: Mapping[str, Any] | None) -> None:
    """Refuse an unknown projection, or an argument that it does not take.

    Raises:
        RecipeError: naming those that are.
    """
    if kind is not None and kind not in _KINDS:
        raise RecipeError(
            f"there is no projection named {kind!r}", f"Choose one of: {', '.join(_KINDS)}."
        )
    allowed = {"seed"} if kind == "linear" else set()
    for key, value in dict(arguments or {}).items():
        if key not in allowed or not isinstance(value, int):
            raise RecipeError(
                f"projection_args has {key!r}: {value!r}",
                "A linear projection takes seed, an integer; others take nothing.",
            )


class Projections:
    """Learned projections of some pairs, ``[D_teacher, D_student]`` each, in the student's dtype.

    They are initialized with orthonormal rows or columns, which preserve lengths as far as
    possible.

    Attributes:
        body: the module of the student below its head; :meth:`join_graph` is a hook for it.

    Args:
        student: the model that is trained.
        teacher: the model that it learns from.
        pairs: one projection for each of them.
        seed: seed of the initial values; the global generators are not used.

    Raises:
        TargetError: a width is unknown before the modules run.
    """

    def __init__(
        self, student: Module, teacher: Module, pairs: Iterable[Pair], seed: int = 0
    ) -> None:
        self._placed: dict[Pair, str] = {}
        self.body: Module = getattr(student, "base_model", student)
        generator = torch.Generator().manual_seed(seed)
        for pair in pairs:
            shape = _projection_shape(student, teacher, pair)
            like = next((each for each in pair.student.parameters()), None)
            first = torch.nn.init.orthogonal_(torch.empty(shape), generator=generator)
            if like is not None:
                first = first.to(device=like.device, dtype=like.dtype)
            name = _free_name(pair.student)
            pair.student.register_parameter(name, Parameter(first))
            self._placed[pair] = name

    def apply(self, pair: Pair, output: Tensor) -> Tensor:
        """Project the student's output, ``[R, D_student] → [R, D_teacher]``."""
        weight: Tensor = getattr(pair.student, self._placed[pair])
        return torch.nn.functional.linear(output.to(weight.dtype), weight)

    def join_graph(self, module: Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of :attr:`body`, which is outside of checkpointed layers."""
        weights = [getattr(pair.student, name) for pair, name in self._placed.items()]
        if not weights or not torch.is_grad_enabled():
            return None
        first = main_tensor(output)
        if first is None or not first.is_floating_point():
            return None
        return _replace_tensor(output, first, with_zero_gradients(first, *weights))

    def remove(self) -> None:
        """Remove the parameters from the student's modules."""
        for pair, name in self._placed.items():
            delattr(pair.student, name)
        self._placed.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """The projections by pair."""
        return {
            f"{pair.student_name} -> {pair.teacher_name}": getattr(pair.student, name)
            .detach()
            .cpu()
            .clone()
            for pair, name in self._placed.items()
        }

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Copy the projections of a checkpoint into the existing parameters."""
        for pair, name in self._placed.items():
            key = f"{pair.student_name} -> {pair.teacher_name}"
            if key in saved:
                getattr(pair.student, name).copy_(saved[key])


def _replace_tensor(output: Any, old: Tensor, new: Tensor) -> Any:
    """Replace the tensor ``old`` in a module's output by ``new``."""
    if output is old:
        return new
    if isinstance(output, MutableMapping):
        for name in [name for name, value in output.items() if value is old]:
            output[name] = new
        return output
    return type(output)(new if value is old else value for value in output)


def _projection_shape(student: Module, teacher: Module, pair: Pair) -> tuple[int, int]:
    ours, theirs = output_width(student, pair.student), output_width(teacher, pair.teacher)
    if ours is None or theirs is None:
        unknown, role = (
            (pair.student_name, "student") if ours is None else (pair.teacher_name, "teacher")
        )
        raise TargetError(
            f"How many features {unknown} of the {role} gives is not known before it runs, so "
            "no projection can be made for it.",
            "Target decoder layers, Linears or embeddings.",
        )
    return theirs, ours


def _free_name(module: Module) -> str:
    """A parameter name that no other distillation of the same module uses."""
    name, number = _NAME, 1
    while hasattr(module, name):
        number += 1
        name = f"{_NAME}_{number}"
    return name


# --------------------
# Distance between two outputs, built from the names in a recipe: transforms and a comparison.

TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "identity": functions.identity,
    "log_softmax": functions.log_softmax,
    "normalize": functions.normalize,
    "softmax": functions.softmax,
}
COMPARISONS: dict[str, Callable[..., Tensor]] = {
    "cosine_similarity": functions.cosine_similarity,
    "cross_entropy": functions.cross_entropy,
    "inner_product": functions.inner_product,
    "kl_divergence": functions.kl_divergence,
    "l1_distance": functions.l1_distance,
    "l2_distance": functions.l2_distance,
    "square_head": functions.square_head,
}
_OF_DISTRIBUTIONS = {"cross_entropy", "kl_divergence"}
_NUMBERS = {"p", "temperature"}
# Arguments that callers of the functions may pass, but recipes may not.
_INNER = {"mean_square"}


@dataclass(frozen=True)
class OutputDistance:
    """Distance between the outputs of student and teacher.

    Attributes:
        transforms: names with their arguments, applied to both in this order.
        comparison: name of the comparison.
        arguments: arguments of the comparison.
    """

    transforms: tuple[tuple[str, Mapping[str, Any]], ...]
    comparison: str
    arguments: Mapping[str, Any]

    @classmethod
    def read(
        cls,
        transforms: str | Sequence[str] | None,
        transforms_args: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None,
        comparison: str,
        comparison_args: Mapping[str, Any] | None,
    ) -> OutputDistance:
        """Create a measure from the names and arguments of a recipe.

        Raises:
            RecipeError: there is no such function, or it does not take such an argument.
        """
        names = [transforms] if isinstance(transforms, str) else list(transforms or [])
        given = [transforms_args] if isinstance(transforms_args, Mapping) else transforms_args
        arguments: list[Mapping[str, Any] | None] = list(given or [None] * len(names))
        if len(arguments) != len(names):
            raise RecipeError(
                f"transforms_args has {len(arguments)} entries for {len(names)} transforms",
                "Give one mapping for each transform, {} where it takes nothing.",
            )
        steps = [
            (name, _checked_arguments("transform", name, args, TRANSFORMS))
            for name, args in zip(names, arguments, strict=True)
        ]
        checked = _checked_arguments("comparison", comparison, comparison_args, COMPARISONS)
        if comparison in _OF_DISTRIBUTIONS and steps and steps[-1][0] == "softmax":
            # The comparisons accept log-probabilities, which stay finite at a probability of 0.
            steps[-1] = ("log_softmax", steps[-1][1])
        return cls(tuple(steps), comparison, checked)

    def loss(self, student_RD: Tensor, teacher_RD: Tensor, rows_N: Tensor | None) -> Tensor:
        """The mean distance over tokens, a float32 scalar.

        Args:
            student_RD: with gradient, any floating dtype.
            teacher_RD: of the same shape and device.
            rows_N: the rows that are real tokens, all if not given.
        """
        arguments = dict(self.arguments)
        if self.comparison == "square_head" and not arguments.get("per_token"):
            arguments["mean_square"] = mean_of_rows(
                lambda rows_ND: functions.squared_norm(self._transformed(rows_ND)),
                teacher_RD,
                rows_N,
            )
        comparison = COMPARISONS[self.comparison]
        return mean_over_tokens(
            lambda ours_ND, theirs_ND: comparison(
                self._transformed(ours_ND), self._transformed(theirs_ND), **arguments
            ),
            student_RD,
            teacher_RD,
            rows_N,
        )

    def _transformed(self, output_ND: Tensor) -> Tensor:
        for name, arguments in self.transforms:
            output_ND = TRANSFORMS[name](output_ND, **arguments)
        return output_ND


def _checked_arguments(
    kind: str,
    name: str,
    given: Mapping[str, Any] | None,
    table: Mapping[str, Callable[..., Tensor]],
) -> Mapping[str, Any]:
    """Check that the function exists and accepts the arguments; return them."""
    if name not in table:
        raise RecipeError(f"there is no {kind} named {name!r}", did_you_mean(name, table))
    arguments = dict(given or {})
    keywords = [
        parameter.name
        for parameter in inspect.signature(table[name]).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name not in _INNER
    ]
    for key, value in arguments.items():
        if key not in keywords:
            takes = f"It takes {', '.join(keywords)}." if keywords else "It takes none."
            raise RecipeError(f"the {kind} {name} has no argument {key!r}", takes)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in _NUMBERS and not (is_number and 0 < value < float("inf")):
            raise RecipeError(f"{key} of the {kind} {name} is {value!r}", "Give a number above 0.")
    return arguments


# --------------------
# Weight of a micro-batch in gradient accumulation.

_IGNORED = -100  # transformers' label of a position without a target


def micro_batch_weight(batch: Any, given: Mapping[str, Any]) -> float | Tensor:
    """Factor for a mean over this micro-batch, so that it accumulates as the loss does.

    A loss comes in one of two forms. A mean over the micro-batch is divided by the number of
    micro-batches later on, and so is a term that is added to it: the factor is 1. A sum over the
    micro-batch that is divided by the number of targets of the whole step is accumulated unchanged:
    the factor of a mean is its share of the step's tokens, or of its targets if only these are
    known.

    Args:
        batch: the micro-batch.
        given: arguments of ``LOSS_CALCULATED``. ``num_items_in_batch``: targets in the whole step,
            if the loss is divided by it. ``num_tokens_in_batch``: its tokens without padding.
            ``token_weight``: the factor itself, from a caller that knows it.
    """
    if given.get("token_weight") is not None:
        return cast(Tensor, given["token_weight"])
    items, tokens = given.get("num_items_in_batch"), given.get("num_tokens_in_batch")
    if items is None or not isinstance(batch, Mapping):
        return 1.0
    own = _target_count(batch) if tokens is None else num_batch_tokens(batch)
    if own is None:
        return 1.0
    total = items if tokens is None else tokens
    weight: Tensor = own / (total.to(own.device) if isinstance(total, Tensor) else total)
    return weight


def task_loss(loss: Tensor, batch: Any) -> Tensor:
    """The task loss; zero for a batch without targets, whose mean would be 0 / 0."""
    labels = batch.get("labels", batch.get("shift_labels")) if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        return loss
    has_targets = (labels != _IGNORED).any().to(loss.device)
    return torch.where(has_targets, loss, torch.zeros_like(loss))


def _target_count(batch: Mapping[str, Any]) -> Tensor | None:
    """Number of predicted tokens; the first of a row is not predicted."""
    labels = batch.get("shift_labels")
    if labels is None and isinstance(batch.get("labels"), Tensor):
        labels = batch["labels"][..., 1:]
    return (labels != _IGNORED).sum() if isinstance(labels, Tensor) else None


# --------------------
# Checks of the teacher, and of parameters and outputs that have to be trainable.


def teacher_of(state: State) -> Module:
    """The session's teacher; refuse a missing or unusable one."""
    teacher = state.teacher_model
    if teacher is None:
        raise ArgumentError(
            "OutputDistillationModifier has no teacher to learn from.",
            "Give train distill_teacher=... (--distill-teacher), a Trainer with the "
            "SessionManagerMixIn teacher=..., session.initialize teacher_model=...",
        )
    if not isinstance(teacher, Module):
        raise ArgumentError(
            f"The teacher is a {type(teacher).__name__} and not a model.",
            "Load it first; only the distill_teacher of train may be a name.",
        )
    if teacher is state.model:
        raise ArgumentError(
            "The teacher is the student itself, so there is nothing to learn.",
            "Give a copy that stays as it is: copy.deepcopy(model).",
        )
    return teacher


def expect_whole_parameters(state: State) -> None:
    """Refuse a learned projection if parameters are sharded outside of their module's forward."""
    strategy = state.hardware.distributed_strategy
    name = {"fsdp": "FSDP", "zero3": "DeepSpeed ZeRO stage 3"}.get(strategy or "")
    if name is not None:
        raise ArgumentError(
            f"A learned projection cannot be used with {name}, which splits its parameters.",
            "Use DDP or ZeRO stage 2, or compare outputs of equal width without a projection.",
        )


def expect_gradient(pair: Pair, output: Tensor) -> None:
    """Refuse an output without a gradient although its module has trainable parameters."""
    trained = any(each.requires_grad for each in pair.student.parameters())
    if trained and not output.requires_grad:
        names = TrainingArguments.__dataclass_fields__
        settings = current_name(names, "activation_checkpointing_kwargs")
        raise InputError(
            f"The output of {pair.label} carries no gradient, so distillation would train nothing.",
            "With activation checkpointing compare whole layers, or set "
            f"{settings}={{'use_reentrant': False}}; otherwise run the student with gradients.",
        )
