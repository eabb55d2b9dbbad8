"""A conversation: commands typed between questions, how answers look, and which partner answers."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from terminal import Terminal

from penstock.cli.chat import HELP, Chat
from penstock.cli.chat_input import candidates, open_history, open_input
from penstock.cli.chat_partner import Piece
from penstock.cli.chat_screen import PlainScreen, StreamedMarkdown, split_blocks
from penstock.cli.chat_server import ServerPartner
from penstock.cli.chat_session import Conversation, Reply, ReplyMeter
from penstock.contract.errors import ConfigError, EngineFault, InvalidParameter


class Scripted:
    """A partner that answers with what it was asked, and may be interrupted or fail."""

    name = "scripted"
    context = 1000

    def __init__(self):
        self.asked = []
        self.params = []
        self.ending = None
        self.closed = 0

    def stream(self, messages, params):
        self.asked.append([(each.role, each.content) for each in messages])
        self.params.append(dict(params))
        try:
            yield Piece("You said ", prompt_tokens=7, tokens=2)
            if self.ending is not None:
                raise self.ending
            yield Piece(messages[-1].content, prompt_tokens=7, tokens=5, finish_reason="stop")
        finally:
            self.closed += 1


@pytest.fixture
def partner():
    return Scripted()


@pytest.fixture
def chat(partner, capsys):
    """Types lines into one conversation; returns what was printed meanwhile."""
    conversation = Conversation("Be brief.")
    held = Chat(partner, conversation, PlainScreen())

    def take(*lines):
        capsys.readouterr()
        for line in lines:
            held.take(line)
        return capsys.readouterr().out

    take.conversation = conversation
    return take


def test_an_answer_is_kept_and_the_next_question_brings_it_along(chat, partner):
    assert chat("one") == "You said one\n"
    chat("two")
    turns = [("user", "one"), ("assistant", "You said one"), ("user", "two")]
    assert partner.asked[-1] == [("system", "Be brief."), *turns]
    chat("/clear", "/system -", "three")
    assert partner.asked[-1] == [("user", "three")]


def test_retry_asks_the_last_question_in_place_of_its_answer(chat, partner):
    assert "nothing was asked" in chat("/retry")
    chat("one", "two", "/retry")
    assert partner.asked[-1] == partner.asked[-2]
    assert len(chat.conversation.turns) == 4


def test_a_retry_that_fails_keeps_the_answer_there_was(chat, partner):
    chat("one")
    partner.ending = EngineFault("no more memory")
    assert "no more memory" in chat("/retry")
    assert [each.content for each in chat.conversation.turns] == ["one", "You said one"]


def test_an_interrupted_answer_is_kept_as_far_as_it_got(chat, partner):
    partner.ending = KeyboardInterrupt()
    assert chat("one") == "You said  [stopped]\n"
    assert chat.conversation.turns[-1].content == "You said "
    assert partner.closed == 1


def test_parameters_are_chosen_checked_listed_and_taken_back(chat, partner):
    assert "* temperature" in chat("/set temperature 0.2")
    chat("/set stop END", "one")
    assert partner.params[-1] == {"temperature": 0.2, "stop": "END"}
    assert "temperature" in chat("/set temperature hot")
    assert "/set lists them" in chat("/set top_kk 3")
    assert "/set lists them" in chat("/set top_kk")
    listed = chat("/set").splitlines()
    assert [line.split()[1] for line in listed if line.startswith("*")] == ["stop", "temperature"]
    assert not any(" best_of " in line or " n " in line[:6] for line in listed)
    assert max(map(len, listed)) <= 100
    chat("/set max-tokens 7", "/set temperature default", "/set stop default", "two")
    assert partner.params[-1] == {"max_tokens": 7}


def test_a_conversation_is_saved_and_gone_on_with(chat, partner, tmp_path):
    file = tmp_path / "talk.json"
    chat("/set top_k 5", "one", f"/save {file}", "/clear", "/system -", "/set top_k default")
    assert "1 turns" in chat(f"/load {file}")
    chat("two")
    assert partner.asked[-1][:3] == [("system", "Be brief."), ("user", "one"), ("assistant", "You said one")]
    assert partner.params[-1] == {"top_k": 5}
    assert "name a file" in chat("/save")
    assert "cannot be written" in chat(f"/save {tmp_path / 'no' / 'file'}")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"turns": []}',
        '[{"role": "user", "content": "x"}]',
        '{"messages": [], "params": {"top_k": "x"}}',
        '{"messages": [], "params": {"n": 2}}',
        "3",
    ],
)
def test_a_file_that_holds_no_conversation_changes_nothing(chat, tmp_path, content):
    chat("one")
    (tmp_path / "bad.json").write_text(content)
    assert "bad.json" in chat(f"/load {tmp_path / 'bad.json'}")
    assert len(chat.conversation.turns) == 2


def test_stats_help_and_what_is_unknown(chat):
    chat("one", "two")
    assert "answers   2 of 10 tokens" in chat("/stats")
    assert "context   12 of 1000 tokens" in chat("/stats")
    shown = chat("/nonsense")
    assert "unknown: /nonsense" in shown
    assert all(command in shown for command in HELP)


def test_the_line_below_an_answer():
    line = Reply(prompt_tokens=20, tokens=80, first=0.0812, rate=52.07).line(context=1000)
    assert line == "52.1 tokens/s · first after 0.08 s · 100 of 1000 tokens of context (10%)"
    assert Reply(0, 0, 0.5, 0.0, stopped=True).line(0) == "stopped · first after 0.50 s"
    assert (
        Reply(0, 3, 0.5, 0.0, stopped=True, counted=False).line(8) == "stopped · first after 0.50 s · at least 3 tokens"
    )
    assert Reply(0, 0, None, 0.0, stopped=True).line(8) == "stopped"


def metered(*pieces: Piece | float, stopped: bool = False) -> Reply:
    """The reply made of these pieces, on a clock that starts at 100; a number lets that many seconds pass."""
    clock = 100.0
    meter = ReplyMeter(lambda: clock)
    for piece in pieces:
        if isinstance(piece, Piece):
            meter.take(piece)
        else:
            clock += piece
    return meter.reply(stopped=stopped)


def test_an_answer_is_measured_from_its_first_piece():
    counted = Piece("a", prompt_tokens=20, tokens=3), 2.0, Piece("b", prompt_tokens=20, tokens=9)
    assert metered(0.5, Piece(prompt_tokens=20), 1.0, *counted) == Reply(20, 9, first=1.5, rate=3.0)
    assert metered(0.5, *counted, stopped=True) == Reply(20, 9, first=0.5, rate=3.0, stopped=True)
    at_the_end = Piece("a"), 4.0, Piece(" b"), Piece(prompt_tokens=20, tokens=9)
    assert metered(0.5, *at_the_end) == Reply(20, 9, first=0.5, rate=2.0)
    assert metered(Piece("a", 20, 1), 1.0).rate == 0.0


def test_pieces_are_counted_where_nobody_counts_tokens():
    stopped = metered(0.5, Piece(reasoning="so"), 1.0, Piece("one"), Piece(" two"), Piece(), stopped=True)
    assert stopped == Reply(0, 3, first=0.5, rate=0.0, stopped=True, counted=False)
    assert stopped.used == 0
    assert metered(0.5, stopped=True) == Reply(0, 0, first=None, rate=0.0, stopped=True)


def test_what_may_be_typed_next():
    commands = tuple(HELP)
    assert candidates("/s", "", "", commands) == ["/set", "/system", "/stats", "/save"]
    assert candidates("/set", " ", "top", commands) == ["top_k", "top_n_sigma", "top_p"]
    assert candidates("/set", " ", "top_k ", commands) == ["default"]
    assert candidates("/clear", " ", "", commands) == []


def test_the_history_is_for_its_owner_alone(tmp_path):
    file = tmp_path / "new" / "history"
    history = open_history(file)
    history.store_string("my secret")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    open_history(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    open_history(tmp_path / "new" / "history" / "x").store_string("kept in memory")


MARKDOWN = """# Fruits

Some **bold** words that are long enough to be wrapped on a narrow screen.

1. one

   more of one

2. two

```python
x = 1

y = 2
```

| a | b |
|---|---|
| 1 | 2 |

The end."""


def test_blocks_are_cut_where_empty_lines_are_but_not_inside_of_code_and_lists():
    blocks, rest = split_blocks(MARKDOWN)
    assert [block.strip()[:6] for block in blocks] == ["# Frui", "Some *", "1. one", "```pyt", "| a | "]
    assert "2. two" in blocks[2]
    assert "y = 2" in blocks[3]
    assert rest == "The end."
    assert "\n".join([*blocks, rest]) == MARKDOWN


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_streamed_markdown_shows_every_line_once_however_it_is_cut(size):
    def shown(pieces, terminal):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=40, height=12, color_system=None)
        with StreamedMarkdown(console) as view:
            for piece in pieces:
                view.write(piece)
        return console.file.getvalue()

    pieces = [MARKDOWN[at : at + size] for at in range(0, len(MARKDOWN), size)]
    plain = shown(pieces, terminal=False)
    assert plain.split() == shown([MARKDOWN], terminal=False).split()
    for words in ("Fruits", "bold words that", "narrow screen.", "1 one", "more of one", "2 two", "y = 2", "The end."):
        assert plain.count(words) == 1, words
    assert "**" not in plain
    assert "```" not in plain
    assert "The end." in shown(pieces, terminal=True)


@contextmanager
def server(status=200, *events, models=None):
    """A server that answers every question with these events; gives its base URL and the bodies sent to it."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            listed = {"data": [{"id": "first", "max_model_len": 64}, {"id": "second"}]} if models is None else models
            self.answer(200, "application/json", json.dumps(listed))

        def do_POST(self):
            bodies.append((dict(self.headers), json.loads(self.rfile.read(int(self.headers["content-length"])))))
            kind = "text/event-stream" if status == 200 else "application/json"
            self.answer(status, kind, "".join(f"data: {each}\n\n" for each in events) if status == 200 else events[0])

        def answer(self, code, kind, text):
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{served.server_port}", bodies
        finally:
            served.shutdown()


def chunk(**delta):
    return json.dumps({"choices": [{"delta": delta, "finish_reason": None}]})


def test_one_slow_drawing_does_not_stop_the_screen(monkeypatch):
    """The first drawing imports libraries, which takes seconds on a busy machine."""
    clock = [0.0]
    monkeypatch.setattr("penstock.cli.chat_screen.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    with StreamedMarkdown(Console(file=out, force_terminal=True, width=40, height=10)) as view:
        update = view._live.update

        def slow(*args: object, **options: object) -> None:
            clock[0] += 30.0
            update(*args, **options)

        view._live.update = slow
        view.write("one")
        view._live.update = update
        clock[0] += 2.5
        view.write(" two")
        assert "two" in out.getvalue()


def test_a_server_is_asked_as_openais_clients_ask_it():
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})
    events = (
        chunk(role="assistant"),
        chunk(reasoning_content="hm"),
        chunk(content="Hé"),
        chunk(content="llo"),
        usage,
        "[DONE]",
    )
    with server(200, *events) as (url, bodies):
        partner = ServerPartner(url, "second", "sesame")
        messages = Conversation("Be brief.").asking("hi")
        pieces = list(partner.stream(messages, {"temperature": 0.5, "max_tokens": None}))
    assert (partner.name, partner.context) == ("second", 0)
    assert "".join(piece.text for piece in pieces) == "Héllo"
    assert "".join(piece.reasoning for piece in pieces) == "hm"
    assert (pieces[-1].prompt_tokens, pieces[-1].tokens) == (9, 3)
    [(headers, body)] = bodies
    assert headers["Authorization"] == "Bearer sesame"
    assert body == {
        "model": "second",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.5,
    }


def test_what_a_server_refuses_or_breaks_is_said():
    error = json.dumps({"error": {"message": "temperature: too hot"}})
    with server(400, error) as (url, _), pytest.raises(EngineFault, match="HTTP 400: temperature: too hot"):
        list(ServerPartner(url).stream([], {}))
    with server(200, chunk(content="a"), error) as (url, _), pytest.raises(EngineFault, match="too hot"):
        list(ServerPartner(url).stream([], {}))
    with server(200, "{") as (url, _), pytest.raises(EngineFault, match="no chunk"):
        list(ServerPartner(url).stream([], {}))
    with server() as (url, _), pytest.raises(ConfigError, match=r"'third' is not served at .*; there: first, second"):
        ServerPartner(url, "third")
    with server(models=[]) as (url, _), pytest.raises(ConfigError, match="does not list its models"):
        ServerPartner(url)
    with pytest.raises(ConfigError, match="no server answers at "):
        ServerPartner("http://127.0.0.1:1")


def test_parameters_that_a_conversation_does_not_show_cannot_be_chosen():
    with pytest.raises(InvalidParameter, match="/set lists them"):
        Conversation().choose("best_of", "3")


def test_a_terminal_has_markdown_a_history_and_several_lines(tmp_path):
    answer = chunk(content="Some **bold** words.\n\n- a list\n")
    with (
        server(200, answer, "[DONE]") as (url, bodies),
        Terminal("chat", "--base-url", url, PENSTOCK_CACHE=str(tmp_path)) as terminal,
    ):
        terminal.expect("first: type a question")
        terminal.expect("> ")
        terminal.type("one\\\rtwo\x1b\rthree\r")
        terminal.expect("Some bold words.")
        terminal.expect("• a list")
        terminal.expect("first after")
        terminal.type("\x1b[A\r")  # the last question again
        terminal.expect("Some bold words.")
        terminal.expect("first after")
        terminal.type("/exit\r")
        assert terminal.ends() == 0
        assert "\x1b[1mbold" in terminal.raw
    questions = [body["messages"][-1]["content"] for _, body in bodies]
    assert questions == ["one\ntwo\nthree"] * 2
    assert stat.S_IMODE((tmp_path / "chat-history").stat().st_mode) == 0o600


def test_who_hears_of_signals_hears_of_them_after_a_question(tmp_path, monkeypatch):
    """Otherwise Ctrl-C during an answer might come between two system calls and wake nothing."""
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    earlier = signal.set_wakeup_fd(writer)
    try:
        with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
            keys.send_text("a question\r")
            assert open_input((), tmp_path)() == "a question"
        assert signal.set_wakeup_fd(earlier) == writer
    finally:
        signal.set_wakeup_fd(earlier)
        os.close(reader)
        os.close(writer)
