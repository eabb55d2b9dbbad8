"""The command line as people use it: its output, its exit codes and its one-line errors.

A command runs in this process unless the test needs a separate one, which would import torch again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import only_line, penstock, started
from example_scripts import run_here
from tiny_adapters import linear_modules, load_with_adapters, write_adapter
from tiny_checkpoints import write_lettered

from penstock.kernels import native


def test_a_mistake_is_one_line_and_exit_code_2():
    done = started("generate", "-p", "x", "--max-num-seqs", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--max-num-seqs: " in only_line(done.stderr)


def test_a_mistyped_command_is_answered_with_the_likeliest_one():
    done = penstock("chatt")
    assert done.returncode == 2
    assert "No such command 'chatt'. Did you mean 'chat'?" in done.stderr
    assert "See penstock --help." in penstock("xyzzy").stderr


SHORT_BENCH = ["--streams", "1", "--prompt-tokens", "4", "--new-tokens", "2", "--repeats", "1"]


@pytest.mark.model
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "-p", "x", "--max-tokens", "2"],
        pytest.param(
            ["bench", "batch", "--no-limits", *SHORT_BENCH],
            marks=pytest.mark.deep,
        ),
        pytest.param(["show"], marks=pytest.mark.deep),
    ],
)
def test_that_torch_computes_is_said_on_standard_error(default_model: Path, command):
    done = penstock(*command, isa="torch")
    assert only_line(done.stderr) == (
        "penstock: torch was asked for: torch kernels compute, slower, and exact up to rounding only"
    )


def test_verifys_start_report_says_once_that_torch_computes(endless: str, tmp_path: Path):
    sizes = ["--requests", "2", "--schedules", "1", "--prompt-tokens", "4", "--new-tokens", "2"]
    done = penstock("verify", endless, *sizes, "--trace", str(tmp_path / "trace.jsonl"), isa="torch")
    assert (done.stdout + done.stderr).count("torch was asked for") == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith("runs on ")]
    assert line.endswith("torch was asked for: torch kernels, slower, exact up to rounding")


def test_the_version():
    from penstock import __version__

    assert started("--version").stdout == f"penstock, version {__version__}\n"


NOBODY_ASKS = {"served_model_name", "scheduling_policy", "max_queued_requests", "max_queued_tokens", "tool_call_parser"}
NOBODY_ASKS |= {
    "tensor_parallel",
    "runner",
    "standby",
    "step_target_ms",
    "max_queue_seconds",
    "memory_limit",
    "lora_dir",
}
NOBODY_ASKS |= {"kv_events", "kv_events_replay", "kv_events_topic", "kv_events_format", "kv_events_buffer"}
NOBODY_ASKS |= {"keep_step_times"}
"""Options that mean nothing where one asks whom nobody waits beside, by no name, and who offers no tools."""

OWN_DEFAULTS = {"run-batch": {"step_target_ms": 0}}


@pytest.mark.parametrize(
    ("command", "unread"),
    [("serve", set()), ("run-batch", {"lora_dir"}), ("chat", NOBODY_ASKS), ("generate", NOBODY_ASKS)],
)
def test_help_shows_every_option_of_the_engine_that_the_command_reads_with_its_default(command, unread):
    from dataclasses import fields

    from penstock.contract.config import EngineConfig

    shown = penstock(command, "--help").stdout
    for field in fields(EngineConfig):
        if field.name == "model":
            continue
        assert (f"--{field.name.replace('_', '-')}" in shown) == (field.name not in unread)
        if field.name in unread:
            continue
        default = OWN_DEFAULTS.get(command, {}).get(field.name, field.default)
        if isinstance(default, int) and not isinstance(default, bool):
            assert f"[default: {default}]" in shown.replace("\n", " ").replace("  ", " ") or default == 0


@pytest.mark.parametrize("command", ["bench batch", "bench quality", "verify"])
def test_measurements_offer_no_option_that_would_do_nothing(command):
    from click.testing import CliRunner

    from penstock.cli import penstock as commands

    shown = CliRunner().invoke(commands, [*command.split(), "--help"]).output
    assert "--threads" in shown
    for option in (
        "tool-call-parser",
        "reasoning-parser",
        "max-queued-tokens",
        "max-queued-requests",
        "scheduling-policy",
    ):
        assert f"--{option}" not in shown
    assert ("--record" in shown) == (command == "bench batch")


def test_a_result_that_could_not_be_written_is_refused_before_anything_runs(tmp_path, refused):
    lost = str(tmp_path / "missing" / "x.json")
    for command in (("bench", "batch"), ("bench", "kernels"), ("bench", "quality"), ("bench", "serve"), ("verify",)):
        assert "--json" in (line := refused(*command, "--json", lost))
        assert "there is no folder" in line
    assert "--trace" in refused("verify", "--trace", lost)
    assert "--output" in refused("generate", "--input", __file__, "--output", lost)
    assert "--output" in refused("run-batch", "--input", __file__, "--output", lost)
    assert "--errors" in refused("run-batch", "-i", __file__, "-o", str(tmp_path / "x"), "--errors", lost)
    assert "--json" in refused("bench", "kernels", "--json", "/proc/version/x")
    assert not list(tmp_path.iterdir())


def test_a_record_that_cannot_be_written_after_all_is_printed(tmp_path, capsys):
    from penstock.cli.bench_report import report
    from penstock.contract.errors import ConfigError

    with pytest.raises(ConfigError, match="--json"):
        report("a table", {"took": "long"}, tmp_path / "gone" / "x.json")
    assert json.loads(capsys.readouterr().out.removeprefix("a table\n")) == {"took": "long"}


def test_help_is_quick_because_it_loads_no_torch():
    code = "import sys; sys.argv = ['penstock', 'generate', '--help']\nimport penstock.cli\n"
    code += "try:\n    penstock.cli.main()\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_mistakes_in_options_are_one_line_and_exit_code_2(tmp_path, refused):
    assert "--max-num-seqs: " in refused("generate", "-p", "x", "--max-num-seqs", "0")
    assert "--temperature" in refused("generate", "-p", "x", "--temperature", "nan")
    assert "--prompt" in refused("generate")
    assert "no-such-model" in refused("generate", "no-such-model", "-p", "x")
    config = tmp_path / "options.yaml"
    config.write_text("no-such-option: 1\n")
    assert "no-such-option; known are block-size, chat-template, device" in refused(
        "generate", "-p", "x", "--config", str(config)
    )
    config.write_text("max-queued-tokens: 5\n")
    assert "keys: max-queued-tokens;" in refused("generate", "-p", "x", "--config", str(config))
    config.write_text("max-num-seqs: many\n")
    assert "--max-num-seqs: " in refused("generate", "-p", "x", "--config", str(config))
    config.write_text("{")
    assert "options.yaml" in refused("generate", "-p", "x", "--config", str(config))


def test_models_that_cannot_be_read_are_one_line_and_exit_code_2(tmp_path, refused):
    def directory(name: str, **files: str) -> str:
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file.replace("__", ".")).write_text(content)
        return str(tmp_path / name)

    assert "config.json" in refused("generate", directory("empty"), "-p", "x")
    assert "config.json" in refused("generate", directory("broken", config__json="{"), "-p", "x")
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\x00")
    assert "short.gguf" in refused("generate", str(tmp_path / "short.gguf"), "-p", "x")
    (tmp_path / "lying.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    assert "lying.gguf" in refused("generate", str(tmp_path / "lying.gguf"), "-p", "x")


@pytest.mark.model
def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path, refused):
    from tiny_checkpoints import write_checkpoint

    assert "tokenizer.json" in refused(
        "generate", str(write_checkpoint(tmp_path, "llama", "wide_heads_untied")), "-p", "x"
    )


@pytest.mark.model
def test_one_prompt_to_the_terminal(default_model: Path):
    done = started("generate", "--chat", "-p", "What is the capital of France?", "--temperature", "0")
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")


@pytest.mark.model
def test_a_prompt_from_standard_input_and_options_from_a_file(default_model: Path, tmp_path):
    config = tmp_path / "options.yaml"
    config.write_text("dtype: float32\nkv-cache-memory: 100MB\n")
    done = penstock(
        "generate", "-p", "-", "--config", str(config), "--temperature", "0", "--max-tokens", "4", stdin="One, two,"
    )
    assert done.returncode == 0
    assert "three" in done.stdout


@pytest.mark.model
def test_a_file_of_prompts_is_resumed_and_mistakes_stay_on_their_line(default_model: Path, tmp_path, refused):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    jobs = [
        {"id": "a", "prompt": "One, two,", "max_tokens": 4, "temperature": 0},
        {"id": "b", "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4, "n": 2},
        {"id": "c", "prompt": [1, 2, 999_999]},
    ]
    source.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    target.write_text('{"id": "a", "choices": [], "usage": {}}\n{"id": "b", "cho')  # an interrupted run
    done = penstock("generate", "--input", str(source), "--output", str(target))
    assert done.returncode == 0, done.stderr
    assert "1 of 3" in done.stderr
    results = {record["id"]: record for record in map(json.loads, target.read_text().splitlines())}
    assert results["a"]["choices"] == []  # kept as it was
    assert len(results["b"]["choices"]) == 2
    assert "vocabulary" in results["c"]["error"]
    source.write_text('{"prompt": "x"\n')
    assert "in.jsonl:1" in refused("generate", "--input", str(source), "--output", str(target))


@pytest.mark.model
def test_a_conversation_in_the_terminal(default_model: Path):
    said = "Where is the Eiffel Tower?\n/system\n/clear\n/nonsense\n/help\n/exit\n"
    done = penstock("chat", "--temperature", "0", "--system", "You are terse.", stdin=said)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "You are terse." in done.stdout
    assert "unknown: /nonsense" in done.stdout


@pytest.mark.model
def test_the_models_are_listed(default_model: Path):
    shown = penstock("models").stdout
    assert "smollm2-135m-instruct" in shown
    assert "98.4 MB" in shown


def test_the_bench_without_a_command_says_which_there_are():
    done = penstock("bench")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("batch", "serve", "quality", "kernels"))


def test_mistakes_in_the_benches_options_are_one_line_and_exit_code_2(tmp_path, refused):
    assert "warm-up request failed: no connection" in refused("bench", "serve", "--base-url", "http://127.0.0.1:1/v1")
    assert "goodput" in refused("bench", "serve", "--goodput", "ttft:200", "itl:50")
    assert "goodput" in refused("bench", "serve", "ttft:200")
    assert "--shared-prefixes" in refused("bench", "serve", "--shared-prefixes", "2")
    assert "--trace-speed" in refused("bench", "serve", "--trace-speed", "2")
    assert "isa" in refused("bench", "kernels", "--isa", "z80")
    assert "PENSTOCK_ISA" in refused("bench", "kernels", isa="z80")
    assert "rate" in refused("bench", "serve", "--trace", "x.jsonl", "--rate", "1")
    assert "x.jsonl" in refused("bench", "serve", "--trace", str(tmp_path / "x.jsonl"))


def test_a_load_test_that_nobody_answers_prints_why_and_exits_with_1():
    done = penstock("bench", "serve", "--base-url", "http://127.0.0.1:1/v1", "--warm-up", "0", "--num-prompts", "3")
    assert done.returncode == 1
    assert "3 x no connection" in done.stdout
    assert done.stderr.splitlines()[-1] == "penstock: no request was answered"


@pytest.mark.model
def test_show_says_what_a_model_is_made_of_down_to_every_operation(default_model: Path):
    done = penstock("show", "--program", *(["--rates"] if native.available() else []))
    assert done.returncode == 0, done.stderr
    head, *layers = done.stdout.split("\nlayer ")
    assert "30 layers, 576 wide, 9 heads of 64, 3 of keys, vocabulary 49152, context 8192" in head
    assert "stored as        Q4_1 69%, Q8_0 31%" in head
    assert "licence          apache-2.0" in head
    assert "chat template    calls of tools in the format json, and no place for tools" in head
    assert "      8,192      KV cache 180.0 MiB, " in head
    assert len(layers) == 30
    assert all("attend(qkv[0:576], qkv[576:768], qkv[768:960], cache " in layer for layer in layers)
    assert done.stdout.splitlines()[-1] == "logits   <- head(out)"
    if native.available():
        check_rates(head.splitlines())


def check_rates(lines: list[str]) -> None:
    start = next(index for index, line in enumerate(lines) if line.startswith("rates "))
    assert "an upper bound, by the machine's limits" in lines[start]
    found = [re.fullmatch(r" +(\d+|prefill) +.*: ([\d,]+) tokens/s", line) for line in lines[start + 1 : start + 5]]
    assert all(found), lines[start:]
    rates = {each[1]: float(each[2].replace(",", "")) for each in found if each}
    assert list(rates) == ["1", "8", "32", "prefill"]
    assert rates["1"] < rates["8"], "streams share what is read of the weights"


@pytest.mark.model
def test_the_bench_prints_a_row_for_each_number_of_streams(default_model: Path, tmp_path):
    done = penstock("bench", "batch", "--streams", "1", "--streams", "3", "--prompt-tokens", "8", "--new-tokens", "2",
                    "--repeats", "2", "--threads", "1", "--json", str(tmp_path / "bench.json"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [row["streams"] for row in record["rows"]] == [1, 3]
    assert all(row["decode_tok_s"] > 0 and row["prefill_tok_s"] > 0 for row in record["rows"])
    assert [len(row["runs"]) for row in record["rows"]] == [2, 2]
    assert record["machine"]["cpus"] >= 1
    assert record["rows"][1]["costs"]["prefill"]["int8_ops"] > 3 * 8 * 2e8
    if record["limits"]:
        assert all(row["decode_share_of_limit"] > 0 for row in record["rows"])
    assert [line.split()[:3] for line in done.stdout.splitlines()[-2:]] == [["8", "2", "1"], ["8", "2", "3"]]


@pytest.mark.deep
def test_kernels_are_timed_beside_the_machines_limits(tmp_path):
    isa = native.isas()[-1] if native.available() else ""
    done = penstock("bench", "kernels", "--kernel", "norm", "--threads", "1", "--json", str(tmp_path / "kernels.json"),
                    isa=isa)  # fmt: skip
    if not native.available():
        assert done.returncode != 0
        assert "compiled kernels" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "kernels.json").read_text())
    assert [row["rows"] for row in record["rows"]] == [1, 8, 32, 256] * 2
    assert (record["limits"]["threads"], record["limits"]["isa"]) == (1, isa)
    assert "GB/s read" in done.stdout
    assert "rms_norm" in done.stdout
    assert "layer_norm" in done.stdout


@pytest.mark.model
@pytest.mark.parametrize("example", ["offline", "online"])
def test_the_examples_run(default_model: Path, example):
    """`tests/e2e/test_e2e_seeds.py` starts them in processes of their own."""
    arguments = ["--prompts", "hi, ", "hello,", "how", "--max-tokens", "6", "--temperature", "0.8", "--seed", "1"]
    said = run_here(example, *arguments)
    assert said.count("### request") == (4 if example == "online" else 3)
    assert ("Hello, world!" in said) == (example == "online")


@pytest.mark.parametrize(
    "command", ["serve", "chat", "generate", "run-batch", "bench batch", "bench quality", "verify"]
)
def test_help_says_what_model_may_be_and_has_its_own_options_before_the_shared_ones(command):
    from click.testing import CliRunner

    from penstock.cli import penstock as commands

    shown = CliRunner().invoke(commands, [*command.split(), "--help"], prog_name="penstock").output
    more = " [MODEL]..." if command == "serve" else ""
    assert shown.startswith(f"Usage: penstock {command} [OPTIONS] [MODEL]{more}\n")
    headings = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[:2] == ["Model:", "Options:"]
    assert set(headings[2:]) <= {"Sampling:", "Engine:", "Server:", "Several models:"}
    assert shown.index("--help", shown.index("Options:")) < shown.index("Engine:") < shown.index("--threads")
    assert ".gguf" in shown
    assert shown.count("MODEL  ") == 1


def test_a_command_of_one_prompt_takes_one_adapter(tmp_path, refused):
    (tmp_path / "model").mkdir()
    model = write_lettered(tmp_path / "model", "llama", "wide_heads_untied")
    modules = linear_modules(load_with_adapters(model).program)
    adapter = write_adapter(tmp_path / "adapter", modules, strength=3.0)
    asked = ("generate", str(model), "-p", "the sea", "--max-tokens", "12", "--temperature", "0", "--ignore-eos")
    bare, adapted = (penstock(*asked, *more) for more in ((), ("--lora", f"poet={adapter}")))
    assert (bare.returncode, adapted.returncode) == (0, 0), adapted.stderr
    assert bare.stdout != adapted.stdout
    two = ("--lora", f"a={adapter}", "--lora", f"b={adapter}")
    assert "--lora: names several adapters" in refused(*asked, *two)
    assert "--lora: " in refused(*asked, "--lora", str(adapter))
