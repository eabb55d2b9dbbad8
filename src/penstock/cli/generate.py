"""`penstock generate`: one prompt to the terminal, or a JSONL file of prompts to a JSONL file of results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from penstock.cli.fallback import tell_torch_computes
from penstock.cli.options import NOT_OFFLINE, build_configs, config_options, library_options, only_adapter
from penstock.cli.prompt_jobs import READ_AHEAD, Job, one_prompt, prompt_options, read_jobs
from penstock.cli.sampling_options import given_sampling, sampling_options, sampling_params
from penstock.cli.sections import SectionedCommand
from penstock.cli.targets import writable
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, RequestError
from penstock.contract.request import Prompt
from penstock.imports import lasting_imports
from penstock.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.llm.offline import LLM
    from penstock.llm.outputs import RequestOutput

__all__ = ["command"]


@click.command("generate", cls=SectionedCommand)
@prompt_options
@click.option(
    "--input",
    "-i",
    "source",
    type=click.Path(path_type=Path, dir_okay=False),
    help=(
        'File of JSON lines, each with "prompt" (text or token ids) or "messages", and optionally "id" and sampling'
        " parameters."
    ),
)
@click.option(
    "--output",
    "-o",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=writable,
    help=("File for results, one JSON line per prompt. Lines already there are not computed again."),
)
@sampling_options(leave_out=frozenset({"logprobs_mode", "prompt_logprobs"}))
@config_options(EngineConfig, leave_out=NOT_OFFLINE | {"model", "tool_call_parser"})
@click.pass_context
def command(
    context: click.Context,
    /,
    text: str | None,
    chat: bool,
    source: Path | None,
    target: Path | None,
    **_: object,
) -> None:
    """Continue one prompt (--prompt), or many (--input and --output), with MODEL."""
    if (text is None) == (source is None):
        raise ConfigError("--prompt", "give either --prompt, or --input with --output")
    if (source is None) != (target is None):
        raise ConfigError("--output", "--input and --output belong together")
    (config,) = build_configs(context, EngineConfig)
    sampling_params(context)  # reports a mistake before the model is loaded
    adapter = only_adapter(config)
    jobs = read_jobs(source, given_sampling(context), chat) if source is not None else []
    with lasting_imports():
        from penstock.llm.offline import LLM  # imports torch: too slow for --help

    tell_torch_computes(config.device)
    with LLM(**library_options(config)) as llm:
        if target is not None:
            run_jobs(llm, jobs, target, adapter)
            return
        params = sampling_params(context, llm.card.sampling_defaults)
        show_one(llm, one_prompt(str(text), chat), params, adapter)


def show_one(llm: LLM, asked: Prompt, params: SamplingParams, adapter: str = "") -> None:
    """Stream one prompt's first choice to the terminal; several choices are printed whole, one after the other."""
    llm.add_request(asked, params, adapter=adapter)
    shown = 0
    final: list[RequestOutput] = []
    while llm.has_unfinished_requests():
        final = llm.step() or final
        if params.n == 1 and final:
            piece = final[0].outputs[0].text[shown:]
            shown += len(piece)
            click.echo(piece, nl=False)
    if params.n > 1:
        click.echo("\n---\n".join(choice.text for choice in final[0].outputs), nl=False)
    click.echo()


def run_jobs(llm: LLM, jobs: list[Job], target: Path, adapter: str = "") -> None:
    """Generate results that the output does not hold yet, appending each as soon as it is complete."""
    done = finished_keys(target)
    rest = [job for job in jobs if job.key not in done]
    if len(rest) < len(jobs):
        click.echo(f"{len(jobs) - len(rest)} of {len(jobs)} prompts are in {target} already", err=True)
    with (
        target.open("a", encoding="utf-8") as out,
        tqdm(total=len(jobs), initial=len(jobs) - len(rest), desc="Generating", unit="prompt") as bar,
    ):
        for record in records(llm, rest, adapter):
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
            out.flush()
            bar.update()


def records(llm: LLM, jobs: list[Job], adapter: str = "") -> Iterator[dict[str, Any]]:
    """Yield results in the order of completion. A prompt that cannot be served has its error as its result."""
    keys: dict[str, str] = {}
    defaults = dict(llm.card.sampling_defaults)
    for job in jobs:
        if job.error:
            yield {"id": job.key, "error": job.error}
            continue
        try:
            params = SamplingParams.from_fields(defaults | job.sampling)
            keys[llm.add_request(job.asked, params, adapter=adapter)] = job.key
        except RequestError as error:
            yield {"id": job.key, "error": str(error)}
        while len(keys) >= READ_AHEAD:
            yield from finished_records(llm, keys)
    while keys:
        yield from finished_records(llm, keys)


def finished_records(llm: LLM, keys: dict[str, str]) -> list[dict[str, Any]]:
    """Compute a step; return the records of requests that it finished, and remove their keys."""
    return [as_record(keys.pop(output.request_id), output) for output in llm.step() if output.finished]


def finished_keys(target: Path) -> set[str]:
    """The ids of the results that are complete; a last line cut off by an interruption is removed from the file.

    Raises:
        ConfigError: the file holds something other than results.
    """
    if not target.exists():
        return set()
    content = target.read_text(encoding="utf-8")
    whole = content[: content.rfind("\n") + 1]
    if len(whole) < len(content):
        target.write_text(whole, encoding="utf-8")
    try:
        return {str(json.loads(line)["id"]) for line in whole.splitlines()}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("--output", f"{target} exists and does not hold results of this command") from error


def as_record(key: str, output: RequestOutput) -> dict[str, Any]:
    """A result as one JSON object."""
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        for choice in output.outputs
    ]
    usage = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(choice.token_ids) for choice in output.outputs),
        "cached_tokens": output.num_cached_tokens,
    }
    record: dict[str, Any] = {"id": key, "choices": choices, "usage": usage}
    if output.error:
        record["error"] = output.error
    return record
