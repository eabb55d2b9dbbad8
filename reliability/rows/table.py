"""Every row: what is promised, what other servers state, and what tests it. In the order of the table."""

from __future__ import annotations

from harness.row import Row
from rows import (
    bombs,
    cost,
    disconnects,
    ends,
    floods,
    fuzz,
    kills,
    limits,
    overload,
    poison,
    rolling,
    server_kills,
    slow_readers,
    smooth,
    soak,
    sockets,
    tests,
)

__all__ = ["ROWS", "chosen"]

_BY_TESTS = "not measured by this harness; `make test` holds it: "

ROWS = (
    Row(
        "R1",
        "Random lives of scheduler, block pool and prefix cache: every law after every call",
        "10,000 episodes, no violation",
        "none found: tests by example",
        tests.random_episodes,
    ),
    Row(
        "R2",
        "The same traces through a slow reference",
        "the same tokens in 1,000",
        "vLLM: tests by feature",
        instead=_BY_TESTS + "answers beside those of transformers (`tests/models`)",
    ),
    Row("R3", "Bugs planted in the core and under `penstock verify`", "every one found", "none", tests.planted_bugs),
    Row(
        "R4",
        "Each request alone, and among others with preemption, chunks and cached prefixes",
        "500 requests: tokens, text and log probabilities the same to the bit",
        "vLLM: 32 prompts of 8 tokens, on CUDA",
        limits.company,
    ),
    Row(
        "R5",
        "Whole and streamed answers; transformers' greedy tokens",
        "the same text in 1,000",
        "llama.cpp: samples",
        instead=_BY_TESTS + "samples (`tests/conformance`, `tests/models`)",
    ),
    Row(
        "R6",
        "Accuracy through HTTP, 64 requests at once",
        "equal to one at a time",
        "vLLM: GSM8K within 0.03",
        instead="its data sets have to be fetched; R4 is the stronger statement",
    ),
    Row(
        "R7",
        "Clients leave at any moment: in head or body, queued, in a prompt, in an answer, at its end; FIN and RST",
        "1,000: all blocks back within 1 s, no descriptor more, others' tokens unchanged",
        "vLLM: 200 of one kind, nothing counted; llama.cpp: one",
        disconnects.disconnects,
        timed=True,
    ),
    Row(
        "R8",
        "Clients leave at each point of a fault: as a step begins, in it, in the reset, in the steps after it",
        "2,000 without a hang; nothing of them is left, and whoever stays is answered",
        "none",
        tests.leaving_in_faults,
    ),
    Row(
        "R9",
        "The same with nobody who resumes",
        "every client is told within 1 s",
        "vLLM: tested for 3 requests",
        instead="there is nothing to measure: streams are always resumed",
    ),
    Row(
        "R10",
        "How long until a first new token after the runner was killed, with one stream and with 32; blocks of KV are"
        " kept in files, as by default",
        "3 s at most",
        "Dynamo's published example, 8B on 8 GPUs: 17 to 45 s",
        kills.restarts,
        timed=True,
    ),
    Row(
        "R11",
        "The runner is killed at random moments under 32 streams: greedy, seeded, n > 1, regex, JSON schema, stop"
        " strings, penalties, tools, log probabilities",
        "100 kills: every stream finishes, to the byte",
        "vLLM: all requests fail, the server exits within 5 s. Dynamo: another worker goes on, if there is one (off by"
        " default)",
        kills.kills_under_streams,
    ),
    Row(
        "R12",
        "One request that crashes steps (exception, SIGSEGV, SIGABRT, exit) among 31 good ones",
        "50: only it fails, with `request_poisoned`; at most 2 restarts each",
        "none: the engine ends, and all requests with it",
        poison.poison,
    ),
    Row(
        "R13",
        "The runner stands still (SIGSTOP) under streams",
        "found within 5 s or three steps; every stream goes on",
        "vLLM: health stays 200 (CVE-2026-114051)",
        ends.hang,
        timed=True,
    ),
    Row(
        "R14",
        "The server is killed: idle, at work, while a runner starts",
        "no process of it after 2 s; its port is free",
        "vLLM: tested",
        ends.orphans,
    ),
    Row(
        "R15",
        "Each runner is killed before it computes",
        "the server gives up, says why and ends with status 1",
        "none",
        ends.crash_loop,
    ),
    Row(
        "R16",
        "Ten times the load that can be served, open loop, over connections that are used again, 3 minutes",
        "goodput 95 % of the peak; the rest refused within 50 ms (p99) with Retry-After; none lost; p99 of the first"
        " token within what the queue's bound allows; idle 5 s later",
        "vLLM: no bound on the queue by default; TGI: 429 above 128",
        overload.tenfold,
        timed=True,
    ),
    Row(
        "R17",
        "One key floods, nine ask now and then",
        "their p99 of the first token at most doubles; none refused",
        "none",
        overload.flood,
        timed=True,
    ),
    Row(
        "R18",
        "Requests that need many times the cache",
        "all finish, to the byte",
        "vLLM: one test of preemption",
        limits.exhaustion,
    ),
    Row(
        "R19",
        "Requests that take longer than the server allows",
        "ended within a step of the deadline; blocks back",
        "none",
        limits.deadlines,
        timed=True,
    ),
    Row(
        "R20",
        "A step is out of memory: an allocation fails; the system kills the process",
        "only the request that asks for too much fails; everybody else goes on to the byte",
        "the engine ends",
        poison.out_of_memory,
    ),
    Row(
        "R21",
        "Mixed requests with a tiny model, 5 % cancelled, 1 % malformed",
        "20,000: less than 20 MB in 100,000; descriptors, threads and blocks as before",
        "Dynamo: endurance scenarios",
        soak.soak,
    ),
    Row(
        "D9",
        "Floods of long prompts, bodies of megabytes, new schemas, stored answers, streams whose readers leave",
        "10 floods of 300: memory of server and runner at rest at most 15 % above that behind four before them;"
        " nothing is counted any more",
        "none found",
        floods.floods,
    ),
    Row("R22", "72 hours of it", "no 5xx, no restart", "none"),
    Row(
        "R23",
        "Schemathesis on the OpenAPI document, right and wrong requests",
        "1,000 an operation: no 5xx, no hang; a canary unchanged",
        "vLLM: right ones only, 50",
        fuzz.schema_fuzz,
    ),
    Row(
        "R24",
        "Pairs of fields with values that no schema would think of",
        "20,000: no 5xx, no hang; a canary unchanged",
        "none",
        fuzz.semantic_fuzz,
    ),
    Row(
        "R25",
        "Bytes that are no request, two, or half of one; idle and dripping connections",
        "20,000: no crash, no way past the key; a canary within 100 ms (p99)",
        "none",
        sockets.raw_bytes,
        timed=True,
    ),
    Row(
        "R26",
        "The official clients",
        "every feature",
        "vLLM: broad",
        instead=_BY_TESTS + "OpenAI's and Anthropic's clients (`tests/conformance`)",
    ),
    Row(
        "R27",
        "200 clients that read a byte a second of 5 MB",
        "less than 1 MiB each",
        "vLLM: deltas are merged",
        slow_readers.slow_readers,
    ),
    Row(
        "R28",
        "Regular expressions, schemas and grammars made to cost much, 8 at once",
        "a chat's first token at most doubles, no stream stands still for 200 ms, no processor time a second later",
        "vLLM: the thread of a compilation that timed out goes on",
        bombs.grammar_bombs,
        timed=True,
    ),
    Row(
        "R29",
        "One key probes what another key cached",
        "no hit, and no difference in time",
        "vLLM: a salt, if asked for",
        instead=_BY_TESTS + "keys never share cached blocks (`tests/server`, `tests/core`)",
    ),
    Row(
        "R30",
        "Damaged files: safetensors, GGUF, settings, tokenizers",
        "one clear error; no crash, no wrong load",
        "none",
        tests.corrupt_files,
    ),
    Row(
        "R31",
        "SIGTERM under 32 streams; a second one",
        "all finish; new ones are refused with 503; status 0; no process left",
        "vLLM: ends them by default; TGI: 90 s",
        ends.termination,
    ),
    Row(
        "R32",
        "Two servers behind a balancer, restarted in turn under load",
        "10 restarts: no request fails, and every answer is the same to the byte",
        "Ray, Kubernetes",
        rolling.rolling_restarts,
    ),
    Row(
        "R33",
        "No disk, no descriptors, nobody who reads the log",
        "serves, or refuses in order",
        "none",
        limits.disk_and_descriptors,
    ),
    Row(
        "R34",
        "Messages between the engine's thread and readers on three event loops, with threads switched at odd moments",
        "a million: none lost, twice or out of order",
        "none",
        tests.messages_between_threads,
    ),
    Row(
        "R35",
        "The whole server is killed at random moments under responses in the background, with `--journal`",
        "40 kills: the next server completes every accepted response, to the byte",
        "none found",
        server_kills.background_kills,
    ),
    Row(
        "S1",
        "Four streams while three prompts of 5,400 tokens are read, with no flag",
        "a token within 150 ms (p99); the prompts take at most 10 % more than without a target for steps",
        "none; llama.cpp's server on an AVX2 machine: a token in 10 to 13 s",
        smooth.long_prompts,
        timed=True,
    ),
    Row(
        "C1",
        "What it costs that the runner is a process of its own, in turns with one process for all",
        "97 % of the throughput with 1, 8 and 32 streams",
        "none found",
        cost.process,
        timed=True,
    ),
    Row(
        "P1", "Planted: logits that are not numbers", "only that request fails; no restart", "none", poison.not_a_number
    ),
    Row("P2", "Planted: a kernel that never returns, asleep or busy", "as R12", "none", poison.stuck_kernel),
    Row(
        "P3",
        "Planted: both wall clocks jump by an hour, to and fro, 100 times",
        "every stream to the byte",
        "none",
        limits.clock_jumps,
    ),
    Row(
        "P4",
        "Planted: the runner that follows a killed one stands still while it loads",
        "found within 90 s; every stream to the byte",
        "none",
        ends.stuck_start,
    ),
)


def chosen(ids: str) -> list[Row]:
    """Return the rows with the given ids, separated by commas, in the order of the table; all rows for "".

    Raises:
        ValueError: there is no such row.
    """
    wanted = {each.strip() for each in ids.split(",") if each.strip()}
    rows = [row for row in ROWS if not wanted or row.id in wanted]
    unknown = wanted - {row.id for row in rows}
    if unknown:
        raise ValueError(f"there is no row {', '.join(sorted(unknown))}; rows are {', '.join(row.id for row in ROWS)}")
    return rows
