"""Conversations for a model without a chat template: plain text, a template of one's own, or a refusal."""

from __future__ import annotations

import json

import pytest
from tiny_checkpoints import write_checkpoint, write_letters

from penstock import LLM
from penstock.contract.errors import ConfigError, InvalidParameter
from penstock.contract.model import HuggingFaceText
from penstock.contract.request import ChatPrompt, Message
from penstock.text import open_text

CHAT = (Message("system", "Be kind."), Message("user", "Hello!"), Message("assistant", "Hi."), Message("user", "Bye!"))
OPTIONS = {"dtype": "float32", "threads": 1, "kv_cache_memory": 2_000_000}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("plain") / "gpt2", "gpt2", "tied")
    write_letters(directory, json.loads((directory / "config.json").read_text())["vocab_size"])
    return directory


def rendered(gpt2, prompt, choice):
    return open_text(HuggingFaceText(str(gpt2)), chat_template=choice).render(prompt).text


def test_turns_are_written_as_a_dialogue_that_the_assistant_goes_on_with(gpt2):
    wanted = "[system]\nBe kind.\n\nUser: Hello!\n\nAssistant: Hi.\n\nUser: Bye!\n\nAssistant:"
    assert rendered(gpt2, ChatPrompt(CHAT), "auto") == wanted


def test_the_last_message_can_be_continued(gpt2):
    open_end = ChatPrompt(CHAT[1:3], add_generation_prompt=False, continue_final_message=True)
    assert rendered(gpt2, open_end, "auto") == "User: Hello!\n\nAssistant: Hi."


def test_none_refuses_and_a_file_wins(gpt2, tmp_path):
    with pytest.raises(InvalidParameter, match="no chat template"):
        rendered(gpt2, ChatPrompt(CHAT), "none")
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert rendered(gpt2, ChatPrompt(CHAT[:2]), str(own)) == "<system>Be kind.<user>Hello!"
    with pytest.raises(ConfigError, match=r"chat_template: .* cannot be read"):
        rendered(gpt2, ChatPrompt(CHAT), str(tmp_path / "nowhere"))


def test_a_models_own_template_is_left_alone(gpt2, tmp_path):
    for file in gpt2.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("own {{ messages[0].content }}")
    text = open_text(HuggingFaceText(str(tmp_path)), chat_template="auto")
    assert (text.render(ChatPrompt(CHAT)).text, text.plain) == ("own Be kind.", False)


def test_the_start_report_says_so_and_the_answer_is_to_the_plain_text(gpt2):
    with LLM(str(gpt2), **OPTIONS) as llm:
        [chat] = llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)
        [plain] = llm.generate("User: hello\n\nAssistant:", use_tqdm=False)
        assert chat.prompt_token_ids == plain.prompt_token_ids
        [line] = [line for line in llm.report if line.startswith("conversations ")]
    assert "as plain text: the model has no chat template (--chat-template FILE" in line
    with LLM(str(gpt2), chat_template="none", **OPTIONS) as llm, pytest.raises(InvalidParameter, match="template"):
        llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)
