# SPDX-License-Identifier: Apache-2.0
"""The command line application. Commands import lazily: ``--help`` loads no torch."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcompressor import __version__
from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments, RunArguments
from llmcompressor.cli.commands import model_free_command, plan_command, show_plan, verify_command
from llmcompressor.cli.failures import report_errors
from llmcompressor.cli.help import GroupedCommand
from llmcompressor.cli.options import call_arguments, option_parameters, output_folder
from llmcompressor.cli.train import run_command, train_command
from llmcompressor.runtime.registry import quick_imports

__all__ = ["app"]

app = typer.Typer(
    name="llmcompressor",
    help="Make a large language model smaller and write a checkpoint that serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

_ARGUMENTS = (ModelArguments, DatasetArguments, RecipeArguments, RunArguments)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


_Text = Annotated[
    str | None,
    typer.Option(
        help="Text: a file, a folder or the name of a dataset. "
        "(default: held-out modules of Python's standard library)"
    ),
]


_Window = Annotated[
    int | None,
    typer.Option(help="Tokens of a window. (default: 256, or what the model takes if it is less)"),
]


_Samples = Annotated[
    int | None, typer.Option(help="How many windows, drawn at random. (default: all)")
]
_Precision = Annotated[
    str, typer.Option(help="What to compute in: auto (as stored), float16, bfloat16 or float32.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llmcompressor {__version__}")
        raise typer.Exit


@app.callback()
def _command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
        ),
    ] = False,
) -> None:
    """Make a large language model smaller and write a checkpoint that serves."""


def _oneshot_signature() -> inspect.Signature:
    """Build the signature: MODEL, the output, and an option for each argument field."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(
                "model",
                keyword,
                annotation=Annotated[
                    str, typer.Argument(metavar="MODEL", help="Folder or name of the model.")
                ],
            ),
            inspect.Parameter(
                "output_dir",
                keyword,
                annotation=Annotated[
                    str,
                    typer.Option(
                        "--output", "--output-dir", "-o", help="Folder to write; must be new."
                    ),
                ],
            ),
            *option_parameters(RecipeArguments, panel="Recipe", required=["recipe"]),
            *option_parameters(DatasetArguments, panel="Calibration data and pipeline"),
            *option_parameters(ModelArguments, panel="Model", skip=["model"]),
            *option_parameters(RunArguments, panel="Run"),
            inspect.Parameter(
                "log_dir",
                keyword,
                default=None,
                annotation=Annotated[
                    str | None, typer.Option("--log-dir", help="Folder for a file of the log.")
                ],
            ),
            inspect.Parameter("debug", keyword, default=False, annotation=Debug),
        ]
    )


def _oneshot(*, debug: bool, **given: Any) -> None:
    """Compress MODEL by a recipe and write the result."""
    with report_errors(debug=debug, resumable=True):
        call = call_arguments(given, *_ARGUMENTS)
        if call.pop("dry_run", False):
            show_plan(call)
            return
        with quick_imports():
            from llmcompressor.entrypoints.oneshot import oneshot  # noqa: PLC0415
        from llmcompressor.logger import configure_logger  # noqa: PLC0415
        from llmcompressor.runtime.progress import hide_tqdm_bars  # noqa: PLC0415

        configure_logger()
        with hide_tqdm_bars():
            oneshot(**call)
        typer.echo(f"Written: {output_folder(given)}")


_signature = _oneshot_signature()
_oneshot.__signature__ = _signature  # type: ignore[attr-defined]
_oneshot.__annotations__ = {
    name: parameter.annotation for name, parameter in _signature.parameters.items()
}
app.command("oneshot", cls=GroupedCommand)(_oneshot)
app.command("train", cls=GroupedCommand)(train_command)
app.command("run", cls=GroupedCommand)(run_command)


@app.command("evaluate", cls=GroupedCommand)
def _evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder or name of the model to measure.")
    ],
    *,
    reference: Annotated[
        str | None, typer.Option(help="The original model, to measure the distance from.")
    ] = None,
    dataset: _Text = None,
    text_file: Annotated[
        Path | None, typer.Option(help="A text file, the same as --dataset FILE.")
    ] = None,
    dataset_config_name: Annotated[
        str | None, typer.Option(help="Configuration of a named dataset.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of the dataset.")] = None,
    text_column: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or name of the tokenizer, if not the model's.")
    ] = None,
    max_seq_length: _Window = None,
    num_samples: _Samples = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows per forward.")] = 8,
    seed: Annotated[int, typer.Option(help="Which windows.")] = 0,
    precision: _Precision = "auto",
    trust_remote_code_model: Annotated[
        bool, typer.Option("--trust-remote-code-model", help="Run the checkpoint's own code.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Measure CHECKPOINT, alone and against the original.

    Perplexity, and with --reference the distance from the original on the same text.
    """
    with report_errors(debug=debug):
        text = _text_source(dataset, text_file)
        with quick_imports():
            from llmcompressor.entrypoints.evaluate import evaluate  # noqa: PLC0415
        from llmcompressor.logger import configure_logger  # noqa: PLC0415

        configure_logger()
        report = evaluate(
            checkpoint,
            reference=reference,
            tokenizer=tokenizer,
            dataset=text,
            dataset_config_name=dataset_config_name,
            split=split,
            text_column=text_column,
            max_seq_length=max_seq_length,
            num_samples=num_samples,
            batch_size=batch_size,
            seed=seed,
            precision=precision,
            trust_remote_code_model=trust_remote_code_model,
        )
        if as_json:
            typer.echo(json.dumps(report.as_dict(), indent=2))
        else:
            from llmcompressor.cli.tables import print_report  # noqa: PLC0415

            print_report(report)


def _text_source(dataset: str | None, text_file: Path | None) -> str | Path | None:
    if text_file is None:
        return dataset
    if dataset is not None:
        raise typer.BadParameter("Give --dataset or --text-file, not both.")
    if not text_file.is_file():
        raise typer.BadParameter(f"There is no file {text_file}.", param_hint="--text-file")
    return text_file


app.command("model-free-ptq", cls=GroupedCommand)(model_free_command)
app.command("plan", cls=GroupedCommand)(plan_command)
app.command("verify", cls=GroupedCommand)(verify_command)


@app.command("demo", cls=GroupedCommand)
def _demo(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Keep the checkpoints in this new folder."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which calibration text.")] = 0,
    debug: Debug = False,
) -> None:
    """Compress the package's own small model and measure it.

    In two ways, with calibration data that every Python has.
    """
    with report_errors(debug=debug):
        from llmcompressor.cli.tables import print_demo  # noqa: PLC0415

        with quick_imports():
            from llmcompressor.entrypoints.demo import demo  # noqa: PLC0415
        from llmcompressor.logger import LoggerConfig, configure_logger  # noqa: PLC0415

        configure_logger(LoggerConfig(console_log_level="WARNING"))
        print_demo(demo(output, seed=seed))
