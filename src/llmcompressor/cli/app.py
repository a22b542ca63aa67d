# SPDX-License-Identifier: Apache-2.0
"""The command line application. Commands import lazily: ``--help`` loads no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcompressor import __version__
from llmcompressor.cli.commands import (
    AsJson,
    Debug,
    Gpu,
    Model,
    Serve,
    Tp,
    Verbose,
    entrypoint,
    oneshot_command,
    plan_command,
    run_command,
    train_command,
)
from llmcompressor.cli.failures import report_errors
from llmcompressor.cli.options import GroupedCommand
from llmcompressor.errors import ArgumentError
from llmcompressor.runtime.limits import parse_json

app = typer.Typer(
    name="llmcompressor",
    help="Make a large language model smaller and write a checkpoint that serves.",
    no_args_is_help=True,
    add_completion=True,  # --install-completion
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

_OF_TASKS = "Benchmarks, by lm-eval (pip install 'llmcompressor[eval]')"
_Text = Annotated[
    str | None,
    typer.Option(
        help="Text: a file, a folder or the name of a dataset. "
        "(default: held-out modules of Python's standard library)"
    ),
]
_TextToCompare = Annotated[
    str | None,
    typer.Option(
        help="Text to measure both on: a file, a folder or the name of a dataset. "
        "(default: none, and neither perplexity nor KL)"
    ),
]
_Window = Annotated[
    int | None,
    typer.Option(help="Tokens of a window. (default: 256, or what the model takes if it is less)"),
]
_Samples = Annotated[
    int | None, typer.Option(help="How many windows, drawn at random. (default: all)")
]
_TextFile = Annotated[Path | None, typer.Option(help="A text file, the same as --dataset FILE.")]
_Tokenizer = Annotated[
    str | None, typer.Option(help="Folder or name of the tokenizer, if not the model's.")
]
_BatchSize = Annotated[
    int, typer.Option(min=1, help="Windows, or requests of a task, per forward.")
]
_Tasks = Annotated[
    str | None,
    typer.Option(
        help="Benchmarks of lm-eval, with commas: tasks, groups, patterns or YAML files. A text is "
        "then measured only if --dataset names one.",
        rich_help_panel=_OF_TASKS,
    ),
]
_Limit = Annotated[
    int | None,
    typer.Option(
        help="Samples of each task, the first ones. (default: all)", rich_help_panel=_OF_TASKS
    ),
]
_Fewshot = Annotated[
    int | None,
    typer.Option(
        help="Examples before each question. (default: as the task says)", rich_help_panel=_OF_TASKS
    ),
]
_IncludePath = Annotated[
    Path | None,
    typer.Option(
        help="A folder with YAML files of further tasks; Python code that they name runs.",
        rich_help_panel=_OF_TASKS,
    ),
]
_Memory = Annotated[
    str | None, typer.Option(help="The most memory to use, as 40GiB or 0=40GiB,cpu=100GiB.")
]
_Resume = Annotated[
    str, typer.Option(help="A run that was broken off: auto, never, must or mixed.")
]
_NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Do not read the written files again.")
]
_NoReport = Annotated[bool, typer.Option("--no-report", help="Do not write report.html.")]
_Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the checkpoint that the output holds.")
]
_Gate = Annotated[
    list[str] | None,
    typer.Option(help="A limit to keep, repeatable: kl=0.02, perplexity=1.03, top1=0.9, size=5GB."),
]
_Engine = Annotated[
    str | None, typer.Option(help="Also run its first blocks in vllm, transformers or sglang.")
]
_EnginePython = Annotated[
    str | None, typer.Option(help="The Python of the engine's environment, if not this one.")
]
_EngineTime = Annotated[
    float | None, typer.Option(help="Seconds that the engine has for one model. (default: 900)")
]
_GateText = Annotated[str | None, typer.Option(help="Text to measure gates on, as for evaluate.")]
_GateReference = Annotated[
    str | None, typer.Option(help="The original to compare with, if not MODEL.")
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


app.command("oneshot", cls=GroupedCommand)(oneshot_command)
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
    text_file: _TextFile = None,
    dataset_config_name: Annotated[
        str | None, typer.Option(help="Configuration of a named dataset.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of the dataset.")] = None,
    text_column: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    tokenizer: _Tokenizer = None,
    max_seq_length: _Window = None,
    num_samples: _Samples = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Windows, or requests of a task, per forward.")
    ] = 8,
    seed: Annotated[int, typer.Option(help="Which windows.")] = 0,
    precision: _Precision = "auto",
    trust_remote_code_model: Annotated[
        bool, typer.Option("--trust-remote-code-model", help="Run the checkpoint's own code.")
    ] = False,
    tasks: _Tasks = None,
    limit: _Limit = None,
    num_fewshot: _Fewshot = None,
    include_path: _IncludePath = None,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    debug: Debug = False,
) -> None:
    """Measure CHECKPOINT, alone and against the original.

    Perplexity, with --reference the distance from the original on the same text, and with --tasks
    scores of benchmarks.
    """
    with report_errors(debug=debug):
        if text_file is not None and dataset is not None:
            raise typer.BadParameter("Give --dataset or --text-file, not both.")
        if text_file is not None and not text_file.is_file():
            raise typer.BadParameter(f"There is no file {text_file}.", param_hint="--text-file")
        report = entrypoint("entrypoints.evaluate:evaluate", verbose)(
            checkpoint,
            reference=reference,
            tokenizer=tokenizer,
            dataset=dataset if text_file is None else text_file,
            dataset_config_name=dataset_config_name,
            split=split,
            text_column=text_column,
            max_seq_length=max_seq_length,
            num_samples=num_samples,
            batch_size=batch_size,
            seed=seed,
            precision=precision,
            trust_remote_code_model=trust_remote_code_model,
            tasks=tasks,
            limit=limit,
            num_fewshot=num_fewshot,
            include_path=include_path,
        )
        _show(report, "print_report", as_json=as_json)


def _show(report: Any, table: str, *, as_json: bool) -> None:
    """Print a report as JSON, or by a function of ``cli.tables``."""
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        from llmcompressor.cli import tables  # noqa: PLC0415  # loads rich

        getattr(tables, table)(report)


@app.command("model-free-ptq", cls=GroupedCommand)
def _model_free(
    model: Model,
    *,
    save_directory: Annotated[
        str,
        typer.Option("--output", "--save-directory", "-o", help="Folder to write; must be new."),
    ],
    scheme: Annotated[
        str | None, typer.Option(help="A preset: FP8_DYNAMIC, FP8_BLOCK, W4A16, NVFP4A16, …")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Instead of a scheme, a JSON file with config_groups and ignore."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="What stays as it is: a name, a class or a re: pattern; repeatable."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where to compute. (default: an accelerator if there is one)"),
    ] = None,
    max_memory: _Memory = None,
    resume: _Resume = "auto",
    no_verify: _NoVerify = False,
    no_report: _NoReport = False,
    overwrite: _Overwrite = False,
    gate: _Gate = None,
    gate_dataset: _GateText = None,
    gate_reference: _GateReference = None,
    verify_with: _Engine = None,
    verify_python: _EnginePython = None,
    verify_timeout: _EngineTime = None,
    verbose: Verbose = 0,
    debug: Debug = False,
) -> None:
    """Round the weights of MODEL from its files alone.

    To nearest, without calibration data, whatever the architecture.
    """
    with report_errors(debug=debug, resumable=True):
        groups = None if config is None else _read(config)
        folder = entrypoint("entrypoints.model_free:model_free_ptq", verbose)(
            model,
            save_directory,
            scheme,
            ignore or (),
            device=device,
            config=groups,
            resume=resume,
            max_memory=max_memory,
            verify=not no_verify,
            report=not no_report,
            overwrite=overwrite,
            gates=gate or None,
            gate_dataset=gate_dataset,
            gate_reference=gate_reference,
            verify_with=verify_with,
            verify_python=verify_python,
            verify_timeout=verify_timeout,
        )
        typer.echo(f"Written: {folder}")


def _read(file: Path) -> Any:
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"The file {file} cannot be read as JSON: {error}.", "Correct it."
        ) from error


app.command("plan", cls=GroupedCommand)(plan_command)


@app.command("verify", cls=GroupedCommand)
def _verify(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder of the model to check.")
    ],
    *,
    reference: Annotated[
        str | None, typer.Option(help="The original model, to compare every tensor with.")
    ] = None,
    serve: Serve = None,
    tp: Tp = None,
    gpu: Gpu = None,
    dtype: Annotated[
        str | None, typer.Option(help="The dtype of activations, if not the model's.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--with", help="Also run it in this engine: vllm, transformers or sglang."),
    ] = None,
    python: _EnginePython = None,
    timeout: _EngineTime = None,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    debug: Debug = False,
) -> None:
    """Check a written CHECKPOINT.

    The exit code is 1 if it has an error.
    """
    with report_errors(debug=debug):
        verify = entrypoint("entrypoints.verify:verify", verbose)
        report = verify(
            checkpoint,
            reference,
            serve=serve,
            tp=tp or None,
            gpu=gpu,
            dtype=dtype,
            engine=engine,
            python=python,
            timeout=timeout,
        )
        _show(report, "print_verification", as_json=as_json)
        if not report.ok:
            raise typer.Exit(1)


@app.command("reproduce", cls=GroupedCommand)
def _reproduce(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder of the model to make again.")
    ],
    *,
    model: Annotated[
        str | None, typer.Option(help="The model, if it is not where it was for the run.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="The data, likewise.")] = None,
    gate_dataset: Annotated[
        str | None, typer.Option(help="The text that gates are measured on, likewise.")
    ] = None,
    gate_reference: Annotated[
        str | None, typer.Option(help="The original that gates compare with, likewise.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Keep what is made in this folder.")
    ] = None,
    verbose: Verbose = 0,
    debug: Debug = False,
) -> None:
    """Make a CHECKPOINT again by its manifest.

    Then compare the bytes. The exit code is 1 if they differ.
    """
    with report_errors(debug=debug):
        found = entrypoint("entrypoints.reproduce:reproduce", verbose)(
            checkpoint,
            model=model,
            dataset=dataset,
            gate_dataset=gate_dataset,
            gate_reference=gate_reference,
            output_dir=output,
        )
        typer.echo(str(found))
        if not found.same:
            raise typer.Exit(1)


@app.command("report", cls=GroupedCommand)
def _report(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder of the model to show.")
    ],
    *,
    reference: Annotated[
        str | None, typer.Option(help="The original model, to measure sizes and errors against.")
    ] = None,
    verbose: Verbose = 0,
    debug: Debug = False,
) -> None:
    """Write the page of a CHECKPOINT anew."""
    with report_errors(debug=debug):
        page = entrypoint("entrypoints.reports:report", verbose)(checkpoint, reference)
        typer.echo(f"Written: {page}")


@app.command("compare", cls=GroupedCommand)
def _compare(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="Folder of a checkpoint.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Folder of another.")],
    *,
    reference: Annotated[
        str | None, typer.Option(help="The model that both were made of, to measure errors from.")
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="The page to write.")] = (
        "comparison.html"
    ),
    dataset: _TextToCompare = None,
    max_seq_length: _Window = None,
    num_samples: _Samples = None,
    trust_remote_code_model: Annotated[
        bool, typer.Option("--trust-remote-code-model", help="Run the checkpoints' own code.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    debug: Debug = False,
) -> None:
    """Put two checkpoints side by side.

    On a page: their sizes, schemes, errors and distance from the original.
    """
    with report_errors(debug=debug):
        found = entrypoint("entrypoints.reports:compare", verbose)(
            first,
            second,
            reference=reference,
            output=output,
            dataset=dataset,
            max_seq_length=max_seq_length,
            num_samples=num_samples,
            trust_remote_code_model=trust_remote_code_model,
        )
        _show(found, "print_comparison", as_json=as_json)
        if not as_json:
            typer.echo(f"Written: {output}")


@app.command("schema", cls=GroupedCommand)
def _schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it to this file instead.")
    ] = None,
    verbose: Verbose = 0,
    debug: Debug = False,
) -> None:
    """Print the JSON schema of recipes, for editors.

    By it they check and complete recipes, with the line
    `# yaml-language-server: $schema=FILE` at the top of a recipe.
    """
    with report_errors(debug=debug):
        schema = entrypoint("recipe.schema:recipe_schema", verbose)()
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":")) + "\n"
        if output is None:
            typer.echo(text, nl=False)
        else:
            output.write_text(text, encoding="utf-8")


@app.command("demo", cls=GroupedCommand)
def _demo(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Keep the checkpoints in this new folder."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which calibration text.")] = 0,
    verbose: Verbose = 0,
    debug: Debug = False,
) -> None:
    """Compress the package's own small model and measure it.

    In two ways, with calibration data that every Python has.
    """
    with report_errors(debug=debug):
        demo = entrypoint("cli.demo:demo", verbose, log_level="WARNING")
        _show(demo(output, seed=seed), "print_demo", as_json=False)
