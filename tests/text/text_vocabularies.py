"""Small tokenizers with the true structure of real families, trained here, saved in both file formats."""

# ruff: noqa: RUF001  (the corpus is made of look-alikes)

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

from penstock.contract.model import GgufVocabulary, HuggingFaceText
from penstock.contract.request import Message

CORPUS = (
    "Hello, world! It's the model's 1st answer: we'll see, they'VE said.",
    "The quick brown fox jumps over the lazy dog. 1234567890 and 3.14159 or 1,000,000.",
    "Grüße aus Zürich; naïve café, Ελληνικά και Русский текст. Ünïcödé é vs e\u0301.",
    "日本語のテキスト、中文字符，한국어 문장입니다。ไทย हिन्दी العربية עברית",
    "emoji: 🙂🙃 👨‍👩‍👧‍👦 🇫🇷 ❤️ 👍🏽 \U0001fae0",
    "def f(x):\n    if x > 0:\n\t\treturn x ** 2  # squared\n\n\nclass A:\r\n    pass\r\n",
    '{"key": [1, 2, {"nested": null}], "url": "https://example.com/a?b=c&d=%20"}',
    "   leading and trailing   \n\n \t mixed\t\twhitespace \u00a0\u2003 \n",
    "",
    " ",
    "\n",
    "<0x41> ▁ Ġ Ċ <notspecial> <|not_a_token|> [INST",
    "don't DON'T ſ ß İ ǅ ʼn 𝔘𝔫𝔦 \x00\x01\x7f \ufeff \ufffd",
    "a" * 100 + " " * 20 + "!" * 30,
    "HTTPServerError camelCase snake_case SCREAMING_CASE ÀÉÎ Straße x²+y³=z¼ ٣٤٥",
)

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}\n"
    "    {{- message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}assistant:"

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + WORDS + r"\p{N}{1,3}|" + REST
QWEN2 = CONTRACTIONS + WORDS + r"\p{N}|" + REST
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    pre: str
    specials: tuple[str, ...]
    template: str
    eos: str
    bos: str = ""
    specials_first: bool = True
    ordinary_added: tuple[str, ...] = ()
    pattern: str = ""
    digits: bool = False
    whole_words: bool = False
    composed: bool = False
    add_bos: bool = False


FAMILIES = {
    "gpt2": Family("gpt-2", ("<|endoftext|>",), PLAIN, "<|endoftext|>", specials_first=False),
    "smollm": Family(
        "smollm", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), CHATML, "<|im_end|>", "<|im_start|>", digits=True
    ),
    "llama3": Family(
        "llama-bpe",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        HEADERS,
        "<|eot_id|>",
        "<|begin_of_text|>",
        specials_first=False,
        pattern=LLAMA3,
        whole_words=True,
        add_bos=True,
    ),
    "qwen2": Family(
        "qwen2",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        CHATML,
        "<|im_end|>",
        specials_first=False,
        ordinary_added=("<think>", "</think>", "    "),
        pattern=QWEN2,
        composed=True,
    ),
    "tekken": Family(
        "tekken",
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        INST,
        "</s>",
        "<s>",
        pattern=TEKKEN,
        whole_words=True,
        add_bos=True,
    ),
}
SENTENCEPIECE = ("llama", "llama-metaspace", "gemma4")
NAMES = (*FAMILIES, *SENTENCEPIECE)
GEMMA4 = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
    *("<tool_response|>", "<|channel>", "<channel|>", '<|"|>'),
)
GEMMA4_VISIBLE = GEMMA4[6:]  # what llama.cpp's converter calls user-defined
ENDS = {"llama": ("<s>", "</s>"), "llama-metaspace": ("<s>", "</s>"), "gemma4": ("<bos>", "<eos>")}
SPECIALS = {name: family.specials for name, family in FAMILIES.items()} | {
    "llama": ("<unk>", "<s>", "</s>"),
    "llama-metaspace": ("<unk>", "<s>", "</s>"),
    "gemma4": GEMMA4,
}


def train(name: str) -> Tokenizer:
    """A tokenizer of about 500 tokens, in the family's published `tokenizer.json` structure."""
    if name == "gemma4":
        return _gemma4()
    return _sentencepiece(metaspace=name == "llama-metaspace") if name in SENTENCEPIECE else _byte_level(FAMILIES[name])


def _byte_level(family: Family) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=family.whole_words))
    if family.composed:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not family.pattern)
    if family.pattern:
        split = pre_tokenizers.Split(Regex(family.pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif family.digits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    first = [AddedToken(s, normalized=False, special=True) for s in family.specials]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=first if family.specials_first else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(first)
    tokenizer.add_tokens([AddedToken(s, normalized=False) for s in family.ordinary_added])
    if family.add_bos:
        tokenizer.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), _prepend(family.bos, tokenizer.token_to_id(family.bos))]
        )
    return tokenizer


def _prepend(bos: str, id_: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, id_)])


def sentencepiece_scores() -> dict[str, float]:
    """Pieces in the order of a SentencePiece model: specials, bytes, merged pieces by score, then single characters."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    learner.train_from_iterator(CORPUS[:7], trainers.BpeTrainer(vocab_size=500, show_progress=False))
    learned = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    merged = [token for token, _ in learned if len(token) > 1]
    single = [token for token, _ in learned if len(token) == 1 and ord(token) < 0x3000]  # the rest falls back to bytes
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merged = [token for token in merged if all(ord(character) < 0x3000 for character in token)]
    return dict.fromkeys(fixed, 0.0) | {token: -float(i) for i, token in enumerate(merged + single)}


def _sentencepiece(*, metaspace: bool) -> Tokenizer:
    scores = sentencepiece_scores()
    vocab = {token: i for i, token in enumerate(scores)}
    merges = generate_merges(vocab, {token: score for token, score in scores.items() if score or len(token) < 3})
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    plain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(plain)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = _prepend("<s>", 1)
    return tokenizer


def _gemma4() -> Tokenizer:
    """Merges learned over whole lines, words and spaces together, and runs of newlines that none of them makes."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split("\n", behavior="isolated")
    learner.train_from_iterator(CORPUS[:12], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    tokens = [*GEMMA4, *(f"<0x{byte:02X}>" for byte in range(256)), "\n\n", "\n\n\n", *learned["vocab"]]
    vocab = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    merges = [(left, right) for left, right in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in GEMMA4])
    tokenizer.add_tokens([AddedToken(s, normalized=False) for s in ("\n\n", "\n\n\n")])
    tokenizer.post_processor = _prepend("<bos>", vocab["<bos>"])
    return tokenizer


def save(name: str, directory: Path) -> HuggingFaceText:
    """Write the directory that `save_pretrained` would."""
    family = FAMILIES.get(name)
    tokenizer = train(name)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    bos, eos = (family.bos, family.eos) if family else ENDS[name]
    config |= {"eos_token": eos, "chat_template": family.template if family else INST}
    if bos:
        config["bos_token"] = bos
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceText(str(directory))


def reference(files: HuggingFaceText) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(files.directory)


def to_gguf(name: str, files: HuggingFaceText) -> GgufVocabulary:
    """The same vocabulary as the converters to GGUF write it."""
    content = json.loads((Path(files.directory) / "tokenizer.json").read_text())
    ids = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    added = {token["content"]: 3 if token["special"] else 4 for token in content["added_tokens"]}
    family = FAMILIES.get(name)
    spm = family is None and name != "gemma4"
    types = [2 if spm and t == "<unk>" else added.get(t, 6 if spm and re.fullmatch("<0x..>", t) else 1) for t in tokens]
    if name == "gemma4":
        types = [_gemma4_type(token, added) for token in tokens]
    merges = content["model"]["merges"]
    bos, eos = (family.bos, family.eos) if family else ENDS[name]
    return GgufVocabulary(
        file="model.gguf",
        model="llama" if spm else "gemma4" if family is None else "gpt2",
        pre="" if family is None else family.pre,
        tokens=tuple(tokens),
        token_types=tuple(types),
        merges=() if spm else tuple(m if isinstance(m, str) else " ".join(m) for m in merges),
        scores=tuple(sentencepiece_scores().values()) if spm else (),
        bos=ids[bos] if bos else -1,
        eos=ids[eos],
        unknown=ids["<unk>"] if family is None else -1,
        add_bos=family is None or family.add_bos,
        add_space_prefix=spm,
        chat_template=INST if family is None else family.template,
    )


def _gemma4_type(token: str, added: dict[str, int]) -> int:
    """As llama.cpp's converter has it: what the vocabulary holds and is not special is ordinary, added or not."""
    if re.fullmatch("<0x..>", token):
        return 6
    return 4 if token in GEMMA4_VISIBLE else 3 if added.get(token) == 3 else 1


def user(*contents: str) -> list[Message]:
    """A conversation that every template here accepts: user and assistant take turns."""
    return [Message("assistant" if i % 2 else "user", content) for i, content in enumerate(contents)]
