"""prepare --format chats: chats, templates and flags that are refused, or counted, in words."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import templates as chats

from megatron_bp.tools import prepare as tool
from megatron_bp.tools.prepare import Options
from megatron_bp.tools.prepare.chats.parse import Limits, chat_in, strings
from megatron_bp.tools.prepare.outcome import OF_CHATS, RejectedError

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "configs/templates/plain.jinja"
GOOD = [chats.turns(f"question {i}", f"answer {i}") for i in range(4)]
# Of bytes: header, line, content, end; and the generation prompt.
HEADERS = """{%- for m in messages %}{{ '[' + m.role + ']\\n' + m.content + eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif %}"""


def run(folder: Path, lines: list[bytes], template: str | Path = PLAIN, **options: Any) -> Any:
    (folder / "a.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    if not isinstance(template, Path):
        (folder / "t.jinja").write_text(template)
        template = folder / "t.jinja"
    given = {"format": "chats", "chat_template": template, "overwrite": True}
    return tool.prepare(Options([folder / "a.jsonl"], folder / "p", **(given | options)))


def lines(*values: Any) -> list[bytes]:
    return [json.dumps(x).encode() for x in values]


def one(**message: Any) -> bytes:
    """A line of a question and one more message."""
    return json.dumps({"messages": [{"role": "user", "content": "q"}, message]}).encode()


def answer(**more: Any) -> bytes:
    return one(role="assistant", **more)


CALL = {"type": "function", "function": {"name": "add", "arguments": {}}}
FLAWED = [
    (b'{"messages": [', "bad_json", ""),
    (b'["messages"]', "not_an_object", ""),
    (b"{}", "not_a_chat", "neither messages nor prompt and completion"),
    (b'{"prompt": "a"}', "not_a_chat", "neither"),
    (b'{"messages": [], "prompt": "a"}', "not_a_chat", "messages beside prompt"),
    (b'{"messages": []}', "no_messages", "messages is empty"),
    (b'{"prompt": "a", "completion": []}', "no_messages", "completion is empty"),
    (b'{"messages": "text"}', "bad_type", "messages is a str, not a list"),
    (b'{"messages": null}', "bad_type", "messages is a NoneType"),
    (b'{"prompt": 3, "completion": "a"}', "bad_type", "prompt is a int, not a list or a text"),
    (b'{"messages": ["text"]}', "bad_type", r"messages\[0\] is a str, not an object"),
    (one(content="a"), "missing_role", r"messages\[1\]"),
    (one(role=None, content="a"), "missing_role", r"messages\[1\]"),
    (one(role=["user"], content="a"), "bad_type", "role is a list"),
    (one(role="robot", content="a"), "unknown_role", "'robot', not system, developer, user"),
    (one(role="Assistant", content="a"), "unknown_role", "'Assistant'"),
    (answer(), "missing_content", r"messages\[1\]"),
    (answer(content=None, tool_calls=[]), "missing_content", ""),
    (answer(content=7), "bad_type", "content is a int, not a text"),
    (answer(content=[{"type": "text", "text": "a"}]), "bad_type", "content is a list"),
    (answer(content=""), "empty_turn", r"messages\[1\]: assistant"),
    (answer(content=" \n\t"), "empty_turn", "assistant"),
    (b'{"prompt": "", "completion": "a"}', "empty_turn", r"prompt\[0\]: user"),
    (answer(content="a", tool_calls={"name": "f"}), "bad_type", "tool_calls is no list"),
    (one(role="user", content="a", tool_calls=[CALL]), "bad_type", "of an assistant"),
    (b'{"prompt": "a", "completion": "b", "tools": ["f"]}', "bad_type", "tools is no list"),
    (answer(content="a\0b"), "nul_byte", r"messages\[1\]"),
    (b'{"prompt": "a", "completion": "\\ud83d half"}', "not_utf8", "half a surrogate"),
    (b'{"prompt": "a", "completion": "\xff"}', "not_utf8", ""),
    (answer(content="x" * 2000), "turn_too_long", "2023 bytes, --max-turn-bytes 1000"),
    (answer(content="a<|endoftext|>b"), "special_token_in_text", r"'<\|endoftext\|>'"),
    (answer(content="a", more={"x": ["<|endoftext|>"]}), "special_token_in_text", ""),
    (one(role="user", content="a"), "no_supervised_turn", "none of assistant"),
    (answer(tool_calls=[CALL]), "template_changes_text", "the tool call 'add' .* not rendered"),
    (answer(tool_calls=[{"id": 1}]), "bad_type", "a tool call without a name"),
]


@pytest.mark.parametrize(("line", "reason", "detail"), FLAWED)
def test_a_flawed_chat_is_skipped_and_told(
    tmp_path: Path, line: bytes, reason: str, detail: str
) -> None:
    given = lines(*GOOD)
    every = [*given[:2], line, *given[2:]]
    # The plain template renders no call: it has no content.
    result = run(tmp_path, every, max_turn_bytes=1000)
    assert result["skipped"] == {reason: 1}
    assert result["skipped_places"] == {reason: ["0/a.jsonl:3"]}
    want = run(tmp_path, given)
    assert (result["documents"], result["supervised_tokens"]) == (4, want["supervised_tokens"])
    with pytest.raises(ValueError, match=rf"0/a\.jsonl:3: {reason}.*{detail}.*; mend it, or leave"):
        run(tmp_path, every, strict=True, max_turn_bytes=1000)


def test_every_reason_has_its_test() -> None:
    elsewhere = {"template_refuses", "template_rewrites_history"}
    assert {reason for _, reason, _ in FLAWED} >= set(OF_CHATS) - elsewhere


def test_what_is_no_flaw(tmp_path: Path) -> None:
    silent = [*GOOD[0]["messages"][:1], {"role": "tool", "content": ""}, *GOOD[1]["messages"]]
    good = [
        {"messages": silent},
        GOOD[0] | {"tools": None, "id": 7},
        GOOD[1] | {"tools": []},
        {"messages": [{"role": "assistant", "content": "I speak first.", "name": None}]},
    ]
    assert run(tmp_path, lines(*good), strict=True)["documents"] == 4


def test_texts_are_found_however_deep() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [{"k": deep}]
    assert list(strings(deep)).count("x") == 1
    limits = Limits(("assistant",), 99, re.compile("x"))
    nested = b"[" * 900 + b'"x"' + b"]" * 900
    line = b'{"messages": [{"role": "assistant", "content": "a", "b": ' + nested + b"}]}"
    with pytest.raises(RejectedError, match="special_token_in_text"):
        chat_in(line, limits)


# --- templates ------------------------------------------------------------------------------------


def test_a_header_that_would_be_generated_is_an_error(tmp_path: Path) -> None:
    """The generation prompt lacks "[assistant]\\n"; the mended template and skip both work."""
    lacking = HEADERS.replace("[assistant]\\n", "")
    message = (
        r"0/a\.jsonl:1: the template puts '\[assistant\]\\n' between its generation prompt and the "
        r"answer \(message 1\), .*add_generation_prompt.*--answer-header skip"
    )
    with pytest.raises(ValueError, match=message):
        run(tmp_path, lines(*GOOD), lacking)
    skipped = run(tmp_path, lines(*GOOD), lacking, answer_header="skip")
    mended = run(tmp_path, lines(*GOOD), HEADERS)
    assert skipped["sample"] == mended["sample"]
    assert ">>>answer" in mended["sample"]
    assert mended["spans"]["answer_header"] == "refuse"


def test_a_header_of_tool_calls_is_an_error_too(tmp_path: Path) -> None:
    calls = "{{- m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
    template = HEADERS.replace("+ m.content + eos_token }}", "}}" + calls + "{{ eos_token }}")
    line = answer(tool_calls=[CALL])
    with pytest.raises(ValueError, match=r"puts '\[assistant\]\\n' between its generation prompt"):
        run(tmp_path, [line], template.replace("[assistant]\\n", ""))
    options = {"answer_header": "skip"}
    sample = run(tmp_path, [line], template.replace("[assistant]\\n", ""), **options)["sample"]
    assert sample == run(tmp_path, [line], template)["sample"]
    assert sample.endswith(f"[assistant]\n>>>{json.dumps([CALL])}<|endoftext|><<<")


def test_a_special_token_inside_of_tool_calls_ends_nothing(tmp_path: Path) -> None:
    calls = "{{- m.tool_calls | tojson if m.tool_calls else m.content }}{{ eos_token }}{{ 'tail' }}"
    template = HEADERS.replace("+ m.content + eos_token }}", "}}" + calls)
    with pytest.raises(ValueError, match=r"assistant's turn \(message 1\) with no special token"):
        run(tmp_path, [answer(tool_calls=[CALL])], template)


def test_a_generation_prompt_that_says_more_is_an_error(tmp_path: Path) -> None:
    thinking = HEADERS.replace("[assistant]\\n", "[assistant]\\n<think>\\n")
    message = r"prompt goes on with '<think>\\n' where the answer \(message 1\) comes after ''; let"
    with pytest.raises(ValueError, match=message):
        run(tmp_path, lines(*GOOD), thinking)


def test_a_turn_without_an_end_is_an_error(tmp_path: Path) -> None:
    endless = HEADERS.replace("+ eos_token", "+ '\\n'")
    message = r"0/a\.jsonl:1: the template ends the assistant's turn \(message 1\) with no special "
    with pytest.raises(ValueError, match=message + r".*--answer-end eos.*--answer-end none"):
        run(tmp_path, lines(*GOOD), endless)
    sample = run(tmp_path, lines(GOOD[0]), endless, answer_end="none")["sample"]
    assert sample == "[user]\nquestion 0\n[assistant]\n>>>answer 0<<<\n"
    sample = run(tmp_path, lines(GOOD[0]), endless, answer_end="eos")["sample"]
    assert sample == "[user]\nquestion 0\n[assistant]\n>>>answer 0<|endoftext|><<<"


def test_an_end_after_the_last_turn_only(tmp_path: Path) -> None:
    """No end is found where it would be in the next turn's text, and no turn is rewritten."""
    last = HEADERS.replace(
        "+ eos_token", "+ '\\n' + (eos_token if loop.last and m.role == 'assistant' else '')"
    )
    two = chats.turns("a", "b", "c", "d")
    with pytest.raises(ValueError, match=r"assistant's turn \(message 1\) with no special token"):
        run(tmp_path, lines(two), last)
    sample = run(tmp_path, lines(two), last, supervise="last")["sample"]
    assert sample.endswith("[assistant]\n>>>d\n<|endoftext|><<<")
    sample = run(tmp_path, lines(two), last, answer_end="none")["sample"]
    assert sample.endswith("\n>>>b<<<\n[user]\nc\n[assistant]\n>>>d<<<\n<|endoftext|>")


REWRITES = HEADERS.replace("+ m.content +", "+ (m.content if loop.last else 'gone') +")


def test_a_template_that_rewrites_history(tmp_path: Path) -> None:
    """Earlier answers lose their text once others follow."""
    long, short = chats.turns("a", "b", "c", "d"), chats.turns("e", "f")
    users = REWRITES.replace("loop.last", "loop.last or m.role == 'user'")
    result = run(tmp_path, lines(long, short), users)
    assert result["skipped"] == {"template_rewrites_history": 1}
    assert result["sample"].endswith(">>>f<|endoftext|><<<")
    message = r"0/a\.jsonl:1: template_rewrites_history \(message 1 is rendered otherwise once"
    with pytest.raises(ValueError, match=message):
        run(tmp_path, lines(long, short), users, strict=True)
    last = run(tmp_path, lines(long), users, supervise="last")
    end = "gone<|endoftext|>[user]\nc<|endoftext|>[assistant]\n>>>d<|endoftext|><<<"
    assert last["sample"].endswith(end)


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ("m.content | upper", "renders the content of message 1 0 times, or changes it"),
        ("m.content + m.content", "renders the content of message 1 2 times"),
        ("m.content | replace('w', 'W')", "not rendered as it is, nor stripped"),
        ("m.content | replace('answer 0', '')", "not rendered as it is, nor stripped"),
        ("m.content[:24]", "nor stripped"),
        ("('!' if 'w' in m.content else '') + m.content", "nor stripped"),
    ],
)
def test_a_template_that_changes_answers(tmp_path: Path, change: str, detail: str) -> None:
    template = HEADERS.replace("m.content", f"(({change}) if m.role == 'assistant' else m.content)")
    chat = chats.turns("question", "answer 0" if "''" in change else "a longer answer, with w's in")
    with pytest.raises(ValueError, match=f"template_changes_text .*{re.escape(detail)}"):
        run(tmp_path, lines(chat), template, strict=True)


def test_a_template_that_refuses(tmp_path: Path) -> None:
    refusing = "{{ raise_exception('no tools\\nhere') if tools else '' }}" + HEADERS
    given = [*GOOD, GOOD[0] | {"tools": [CALL]}]
    result = run(tmp_path, lines(*given), refusing)
    assert result["skipped"] == {"template_refuses": 1}
    told = "t.jinja template: TemplateError: no tools here"
    assert result["skipped_details"] == {"template_refuses": f"0/a.jsonl:5: {told}"}
    with pytest.raises(ValueError, match=rf"0/a\.jsonl:5: template_refuses \({told}\); mend it"):
        run(tmp_path, lines(*given), refusing, strict=True)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('only poems') }}", "TemplateError: only poems"),
        ("{{ messages[9].content.x }}", "UndefinedError: .*no element 9"),
        ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
    ],
)
def test_a_template_that_refuses_every_chat_is_an_error(
    tmp_path: Path, template: str, told: str
) -> None:
    message = r"None of 1 files .*4 template_refuses.*First template_refuses: 0/a\.jsonl:1: .*"
    message += told
    with pytest.raises(ValueError, match=message):
        run(tmp_path, lines(*GOOD), template)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "t.jinja"]


def test_templates_that_cannot_be_used(tmp_path: Path) -> None:
    message = r"--chat-template .*t\.jinja: line 2: TemplateSyntaxError: .*; mend the template"
    with pytest.raises(ValueError, match=message):
        run(tmp_path, lines(*GOOD), "a\n{% if x")
    with pytest.raises(ValueError, match=r"--chat-template .*none: cannot be read .*FileNotFound"):
        run(tmp_path, lines(*GOOD), tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match=r"--chat-template .*latin: cannot be read as UTF-8"):
        run(tmp_path, lines(*GOOD), tmp_path / "latin")
    with pytest.raises(ValueError, match=r"no chat template; give one with --chat-template FILE"):
        run(tmp_path, lines(*GOOD), chat_template=None)


def test_a_chat_that_holds_the_sentinel(tmp_path: Path) -> None:
    from megatron_bp.tools.prepare.chats.spans import SENTINEL

    chat = chats.turns(SENTINEL, f"{SENTINEL}Qz and {SENTINEL}")
    result = run(tmp_path, lines(chat), HEADERS, strict=True)
    assert result["sample"].endswith(f">>>{SENTINEL}Qz and {SENTINEL}<|endoftext|><<<")


def test_the_mask_token_in_a_template(tmp_path: Path) -> None:
    flags = chats.save_tokenizer(tmp_path / "tokenizer")
    template = chats.CHATML.replace("<|im_start|>assistant", "<|mask|><|im_start|>assistant")
    options = {"tokenizer_flags": flags, "answer_header": "skip"}
    run(tmp_path, lines(*GOOD), template, **options)  # in the generation prompt alone
    template = "<|mask|>" + chats.CHATML
    with pytest.raises(ValueError, match=r"1: the chat's text holds the mask token \(id 2\)"):
        run(tmp_path, lines(*GOOD), template, **options)


@pytest.mark.parametrize("text", ["<|mask|>", "<|im_end|>", "a<|eos|>", "<end_of_turn>\n"])
def test_special_tokens_of_a_tokenizer_in_text(tmp_path: Path, text: str) -> None:
    flags = chats.save_tokenizer(tmp_path / "tokenizer")
    given = [chats.turns("a", "yes"), chats.turns(text, "yes"), chats.turns("a", f"no {text} no")]
    result = run(tmp_path, lines(*given), chats.CHATML, tokenizer_flags=flags)
    assert result["skipped"] == {"special_token_in_text": 2}
    assert repr(text.strip("a\n")) in result["skipped_details"]["special_token_in_text"]


def test_text_that_a_tokenizer_turns_into_a_special_token(tmp_path: Path) -> None:
    """NFKC makes of wide letters the text of a token that is looked for after it."""
    from tokenizers import AddedToken, Tokenizer, normalizers
    from transformers import PreTrainedTokenizerFast

    chats.save_tokenizer(tmp_path / "tokenizer")
    inner = Tokenizer.from_file(str(tmp_path / "tokenizer/tokenizer.json"))
    inner.normalizer = normalizers.NFKC()
    inner.add_special_tokens([AddedToken("<|call|>", normalized=True, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|eos|>")
    fast.save_pretrained(tmp_path / "tokenizer")
    flags = ["--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={tmp_path}/tokenizer"]
    wide = "".join(chr(ord(x) + 0xFEE0) for x in "<|call|>")
    given = [
        chats.turns("a", "yes"),
        chats.turns("a", f"no {wide}"),
        chats.turns("\u2460", "\uff41"),
    ]
    result = run(tmp_path, lines(*given), chats.CHATML, tokenizer_flags=flags)
    assert result["skipped"] == {"special_token_in_text": 1}
    assert "holds 4 special tokens, and the tokenizer makes 5" in str(result["skipped_details"])


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--append-eod", r"--append-eod \(--answer-end says how a chat ends\) is for texts"),
        ("--json-key body", "--json-key is for texts, not for --format chats"),
        ("--document-separator line", "--document-separator is for texts"),
        ("--supervise some", "invalid choice: 'some'"),
        ("--answer-end stop", "invalid choice"),
        ("--max-turn-bytes 0", "--max-turn-bytes is 0"),
        ("--supervise-roles ''", "--supervise-roles: give one role or more"),
        ("--tokenizer-type NullTokenizer --vocab-size 9", "give --tokenizer-type HuggingFaceToken"),
    ],
)
def test_flags_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    source = chats.write_lines(tmp_path / "a.jsonl", GOOD)
    command = ["--format", "chats", "--input", str(source), f"--output-prefix={tmp_path}/p"]
    words = ["" if x == "''" else x for x in line.split()]
    with pytest.raises(SystemExit) as error:
        tool.main([*command, f"--chat-template={PLAIN}", *words])
    assert re.search(message, f"{error.value.code}{capsys.readouterr().err}")
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        f"--chat-template {PLAIN}",
        "--supervise last",
        "--supervise-roles user",
        "--answer-header skip",
        "--answer-end none",
        "--split-at-spans",
        "--max-turn-bytes 9",
    ],
)
def test_flags_of_chats_are_refused_for_texts(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    command = ["--input", str(tmp_path / "a.txt"), f"--output-prefix={tmp_path}/p"]
    with pytest.raises(SystemExit, match=f"error: {line.split()[0]} needs --format chats"):
        tool.main([*command, *line.split()])


def test_no_eos_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_bp.tools.prepare import tokenizing

    monkeypatch.setattr(tokenizing.ByteTokenizer, "eod_id", None)
    with pytest.raises(ValueError, match="--answer-end eos: the tokenizer has no EOS token"):
        run(tmp_path, lines(*GOOD), answer_end="eos")
