"""`penstock certify`: writes answers as certificates, which anybody with the same model can verify."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click
from tqdm import tqdm

from penstock.cli.options import NOT_OFFLINE, build_configs, config_options, library_options, only_adapter
from penstock.cli.prompt_jobs import READ_AHEAD, Job, one_prompt, prompt_options, read_jobs
from penstock.cli.sampling_options import given_sampling, sampling_options, sampling_params
from penstock.cli.sections import SectionedCommand
from penstock.cli.targets import writable
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, RequestError
from penstock.imports import lasting_imports
from penstock.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.llm.offline import LLM
    from penstock.llm.outputs import RequestOutput

__all__ = ["command"]

NOT_ALL = 1


@click.command("certify", cls=SectionedCommand)
@prompt_options
@click.option(
    "--input",
    "-i",
    "source",
    type=click.Path(path_type=Path, dir_okay=False),
    help='File of JSON lines as for `penstock generate`, each with "prompt" or "messages", and sampling parameters.',
)
@click.option(
    "--output",
    "-o",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=writable,
    help="File for the certificates, one line per answer in the order of the prompts; by default standard output.",
)
@sampling_options(leave_out=frozenset({"logprobs_mode", "prompt_logprobs"}))
@config_options(EngineConfig, leave_out=NOT_OFFLINE | {"model"})
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
    """Answer one prompt (--prompt), or many at once (--input), with MODEL, and write certificates of the answers.

    A certificate says which model answered what, and holds a hash over the log probabilities of the answer's tokens.
    `penstock verify --certificate FILE` computes the answers again, on any machine. Exit code 1 if a line has no
    certificate.
    """
    if (text is None) == (source is None):
        raise ConfigError("--prompt", "give either --prompt or --input")
    (config,) = build_configs(context, EngineConfig)
    sampling_params(context)  # reports a mistake before the model is loaded
    adapter = only_adapter(config)
    if source is not None:
        jobs = read_jobs(source, given_sampling(context), chat)
    else:
        jobs = [Job("prompt", one_prompt(str(text), chat), given_sampling(context))]
    with lasting_imports():
        from penstock.llm.offline import LLM  # imports torch: too slow for --help

    failed = False
    with LLM(**library_options(config)) as llm, ExitStack() as stack:
        out = sys.stdout if target is None else stack.enter_context(target.open("w", encoding="utf-8"))
        for key, certificate, error in certified(llm, jobs, adapter):
            if error:
                failed = True
                click.echo(f"{key}: {error}", err=True)
            else:
                _write_line(out, certificate)
    if failed:
        raise SystemExit(NOT_ALL)


def _write_line(out: IO[str], line: str) -> None:
    out.write(f"{line}\n")
    out.flush()


def certified(llm: LLM, jobs: list[Job], adapter: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (key, certificate, why there is none) of each job in order; computes many jobs at once."""
    defaults = dict(llm.card.sampling_defaults)
    found: dict[str, tuple[str, str]] = {}
    keys: dict[str, str] = {}
    told = 0
    with tqdm(total=len(jobs), desc="Certifying", unit="prompt", disable=None) as bar:
        for job in jobs:
            if job.error:
                found[job.key] = "", job.error
            else:
                try:
                    params = SamplingParams.from_fields(defaults | job.sampling)
                    keys[llm.add_request(job.asked, params, adapter=adapter, certify=True)] = job.key
                except RequestError as error:
                    found[job.key] = "", str(error)
            while len(keys) >= READ_AHEAD:
                _step(llm, keys, found)
        while True:
            while told < len(jobs) and jobs[told].key in found:
                yield (jobs[told].key, *found.pop(jobs[told].key))
                told += 1
                bar.update()
            if not keys:
                return
            _step(llm, keys, found)


def _step(llm: LLM, keys: dict[str, str], found: dict[str, tuple[str, str]]) -> None:
    """Compute a step, and file the answers that it finished under their keys."""
    for output in llm.step():
        if output.finished:
            found[keys.pop(output.request_id)] = output.certificate, _error(output)


def _error(output: RequestOutput) -> str:
    return "" if output.certificate else output.error or "it was not finished"
