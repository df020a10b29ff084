"""prepare --format chats: where a mask would be wrong in silence, an error instead."""

from pathlib import Path
from typing import Any

import pytest
import templates as chats
from tokenizers import Regex, normalizers

from megatron_bp.tools import prepare as tool
from megatron_bp.tools.prepare import Options
from megatron_bp.tools.prepare.chats.normalized import Normalizer

PLAIN = Path(__file__).parents[2] / "configs/templates/plain.jinja"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return chats.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def hugging_face(flags: list[str]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(flags[-1])


def run(folder: Path, lines: list[Any], template: str | Path, **options: Any) -> dict[str, Any]:
    """Prepares folder/p of the chats with a template's text, or a file of one."""
    if not isinstance(template, Path):
        (folder / "t.jinja").write_text(template)
        template = folder / "t.jinja"
    source = chats.write_lines(folder / "a.jsonl", lines)
    given = {"format": "chats", "chat_template": template, "overwrite": True, "strict": True}
    return tool.prepare(Options([source], folder / "p", **(given | options)))


def answers(folder: Path, hugging_face: Any) -> list[str]:
    """The supervised runs of the one document of folder/p, decoded."""
    ((ids, mask),) = chats.read(folder / "p")
    return [hugging_face.decode(x) for x in chats.runs(ids, mask)]


# --- a normalizer ---------------------------------------------------------------------------------

ONE_BLANK = normalizers.Replace(Regex(r"\s+"), " ")
JOINED = {
    "composed": (normalizers.NFC(), "bl e", "\u0301 yes"),
    "syllable": (normalizers.NFKC(), "\u1112", "\u1161\u11ab ok"),
    "blanks": (ONE_BLANK, "a:\n", "\nok"),
    "pairs": (normalizers.Replace("\n\n", "\n"), "a\n", "\n\nok"),
}


@pytest.mark.parametrize(("normalizer", "prompt", "answer"), JOINED.values(), ids=JOINED)
def test_what_a_normalizer_joins_across_a_cut_is_an_error(
    tmp_path: Path, normalizer: Any, prompt: str, answer: str
) -> None:
    from transformers import AutoTokenizer

    flags = chats.save_tokenizer(tmp_path / "tokenizer", normalizer=normalizer)
    line = {"prompt": prompt, "completion": answer}
    message = r"1: the tokenizer's normalizer joins .* place where a supervised text starts; with"
    with pytest.raises(ValueError, match=f"{message} --split-at-spans"):
        run(tmp_path, [line], PLAIN, tokenizer_flags=flags)
    run(tmp_path, [line], PLAIN, tokenizer_flags=flags, split_at_spans=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    want = normalizer.normalize_str(answer) + "<|eos|>"
    assert answers(tmp_path, tokenizer) == [want]


APART = [normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.Strip(), ONE_BLANK]
APART += [normalizers.Lowercase(), normalizers.Replace("q", "zz"), normalizers.Prepend("_")]
APART += [normalizers.Replace("A", "the answer"), normalizers.Sequence([ONE_BLANK, APART[0]])]


@pytest.mark.parametrize("normalizer", APART)
def test_what_a_normalizer_changes_on_one_side_is_no_error(normalizer: Any) -> None:
    seen = Normalizer(normalizer.normalize_str, ["<e>", "<|"])
    for left, right in (
        ("bl e\u0301", " the answer \ufb01"),
        ("A\u00e9", "A\u00e9 q\u0323\u0307"),
        ("assistant\n", "q"),
        ("e<e>", "\u0301 <e>\u0301"),  # the tokens keep them apart
        ("\n\n <|", "\n <e>"),
    ):
        assert seen.joins(left + right, len(left)) is None
        assert seen.joins("e<e>" + left + right, 4 + len(left)) is None


# --- tool calls -----------------------------------------------------------------------------------

HEAD = "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
TAIL = """{{ '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
EACH = "{% for c in m.tool_calls or [] %}{{ BODY }}{% endfor %}"


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def with_calls(content: str | None, *calls: dict[str, Any]) -> dict[str, Any]:
    turn = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return {"messages": [{"role": "user", "content": "a"}, turn]}


LOST = {
    "the second call": (
        "{{ m.content or '' }}{{ m.tool_calls[0] | tojson if m.tool_calls else '' }}",
        "the tool call 'f' of message 1",
    ),
    "all calls": ("{{ m.content }}", "the tool call 'f' of message 1"),
    "content": (
        "{{ m.tool_calls | tojson if m.tool_calls else m.content }}",
        "the content of message 1, beside its tool calls,",
    ),
    "names": (
        "{{ m.content }}" + EACH.replace("BODY", "'f' + (c.function.arguments | tojson)"),
        "the tool call 'f' of message 1",
    ),
    "arguments": (
        "{{ m.content }}" + EACH.replace("BODY", "c.function.name"),
        "an argument of the tool call 'f' of message 1",
    ),
    "one argument": (
        "{{ m.content }}"
        + EACH.replace("BODY", "c.function.name + (c.function.arguments.x | tojson)"),
        "an argument of the tool call 'f' of message 1",
    ),
    "the end of the content": (
        "{{ m.content[:24] if m.tool_calls else m.content }}{{ (m.tool_calls or '') | tojson }}",
        "the content of message 1, beside its tool calls,",
    ),
}


@pytest.mark.parametrize(("body", "words"), LOST.values(), ids=LOST)
def test_what_a_template_loses_of_a_turn_with_tool_calls(
    tmp_path: Path, flags: list[str], body: str, words: str
) -> None:
    chat = with_calls("I look for it, of course.", *[call("f", {"x": 1, "y": [2]})] * 2)
    with pytest.raises(ValueError, match=rf"1: template_changes_text \({words} is not rendered"):
        run(tmp_path, [chat], HEAD + body + TAIL, tokenizer_flags=flags)


@pytest.mark.parametrize("arguments", [{}, {"x": {"y": [1, None, True, "a"]}}, '{"x": [1]}', "", 7])
def test_calls_that_are_rendered(
    tmp_path: Path, flags: list[str], hugging_face: Any, arguments: Any
) -> None:
    body = "{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
    chat = with_calls(" I look. ", call("f", arguments), call("f", arguments), {"name": "g"})
    run(tmp_path, [chat], HEAD + body + TAIL, tokenizer_flags=flags)
    (answer,) = answers(tmp_path, hugging_face)
    assert answer.startswith(" I look. [{")
    assert answer.endswith('{"name": "g"}]<|im_end|>')


# --- ends and headers -----------------------------------------------------------------------------


def test_all_special_tokens_that_end_a_turn(
    tmp_path: Path, flags: list[str], hugging_face: Any
) -> None:
    end = "{{ m.content + ('<|eot_id|> \n' if m.role == 'assistant' else '') }}"
    run(tmp_path, [chats.turns("a", "yes", "b", "no")], HEAD + end + TAIL, tokenizer_flags=flags)
    both = "<|eot_id|> \n<|im_end|>"
    assert answers(tmp_path, hugging_face) == [f"yes{both}", f"no{both}"]
    end = end.replace("<|eot_id|> \n", "<|eot_id|>ok")  # other text ends the run of them
    run(tmp_path, [chats.turns("a", "yes", "b", "no")], HEAD + end + TAIL, tokenizer_flags=flags)
    assert answers(tmp_path, hugging_face) == ["yes<|eot_id|>", "no<|eot_id|>"]
    tight = (HEAD + "{{ m.content }}" + TAIL).replace("<|im_end|>\n", "<|im_end|>")
    run(tmp_path, [chats.turns("a", "yes", "b", "no")], tight, tokenizer_flags=flags)
    assert answers(tmp_path, hugging_face) == ["yes<|im_end|>", "no<|im_end|>"]


@pytest.mark.parametrize("header", ["refuse", "skip", "supervise"])
def test_text_between_an_answer_and_its_end_is_an_error(
    tmp_path: Path, flags: list[str], hugging_face: Any, header: str
) -> None:
    template = HEAD + "{{ m.content + '\n[turn ' + loop.index|string + ']' }}" + TAIL
    options = {"tokenizer_flags": flags, "answer_header": header}
    message = r"puts '\\n\[turn 2\]' between the assistant's turn \(message 1\) and its end '<\|im_"
    with pytest.raises(ValueError, match=message + ".*mend the template, .*--answer-end none"):
        run(tmp_path, [chats.turns("a", "yes")], template, **options)
    run(tmp_path, [chats.turns("a", "yes")], template, **options, answer_end="none")
    assert answers(tmp_path, hugging_face) == ["yes"]


def test_a_header_that_is_generated(tmp_path: Path, flags: list[str], hugging_face: Any) -> None:
    body = "{{ '<think></think>\n' if m.role == 'assistant' else '' }}{{ m.content }}"
    chat, options = chats.turns("a", "yes", "b", "no"), {"tokenizer_flags": flags}
    with pytest.raises(ValueError, match=r"puts '<think>.*, or .* start: --answer-header supervis"):
        run(tmp_path, [chat], HEAD + body + TAIL, **options)
    run(tmp_path, [chat], HEAD + body + TAIL, **options, answer_header="supervise")
    want = [f"<think></think>\n{x}<|im_end|>" for x in ("yes", "no")]
    assert answers(tmp_path, hugging_face) == want
    asked = HEAD + body + TAIL.replace("assistant\n", "assistant\n<more>")
    with pytest.raises(ValueError, match=r"prompt goes on with 'more>' where the answer"):
        run(tmp_path, [chat], asked, **options, answer_header="supervise")


def words_tokenizer(folder: Path) -> list[str]:
    """Saves one whose blanks are the start of the next word's token, as in Llama 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90,
        special_tokens=["<|eos|>", "<unk>"],
        unk_token="<unk>",
        initial_alphabet=list("[]INSTyesno"),
        show_progress=False,
    )
    unigram.train_from_iterator([chats.WORDS + " yes no" * 9] * 9, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="<|eos|>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return ["--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={folder}"]


def test_a_blank_that_is_in_the_answers_first_token(tmp_path: Path) -> None:
    """The way of the errors: each names one that works, or another that does."""
    from transformers import AutoTokenizer

    flags = words_tokenizer(tmp_path / "tokenizer")
    template = """{%- for m in messages %}{% if m.role == 'user' -%}
{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}
{%- endfor %}"""
    chat, options = chats.turns("a", "yes", "b", "no"), {"tokenizer_flags": flags}
    with pytest.raises(
        ValueError, match=r"puts ' ' between .* --answer-header skip, or .*supervise"
    ):
        run(tmp_path, [chat], template, **options)
    for header, split in (("skip", False), ("skip", True)):
        both = options | {"answer_header": header, "split_at_spans": split}
        with pytest.raises(ValueError, match=r"end before them, and give --answer-header supervis"):
            run(tmp_path, [chat], template, **both)
    run(tmp_path, [chat], template, **options, answer_header="supervise")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    ((ids, mask),) = chats.read(tmp_path / "p")
    found = [tokenizer.convert_ids_to_tokens(x) for x in chats.runs(ids, mask)]
    assert [(x[0][0], "".join(x)) for x in found] == [
        ("\u2581", f"\u2581{word}\u2581<|eos|>") for word in ("yes", "no")
    ]


def test_a_tokenizer_that_strips_pieces_is_not_split(tmp_path: Path) -> None:
    for strip in (normalizers.Strip(True, False), normalizers.Strip(False, True)):
        flags = chats.save_tokenizer(tmp_path / "tokenizer", normalizer=strip)
        with pytest.raises(ValueError, match="--split-at-spans: the tokenizer makes 'ab' of"):
            run(tmp_path, [chats.turns("a", " b")], PLAIN, tokenizer_flags=flags,
                split_at_spans=True)  # fmt: skip


# --- turns ----------------------------------------------------------------------------------------


def test_weights(tmp_path: Path, flags: list[str], hugging_face: Any) -> None:
    chat = chats.turns("a", "yes", "b", "no", "c", "user")
    for i, weight in ((0, 1), (1, 0), (3, 1), (5, 0.0)):
        chat["messages"][i]["weight"] = weight
    for supervise in ("all", "last"):
        run(tmp_path, [chat], chats.CHATML, tokenizer_flags=flags, supervise=supervise)
        assert answers(tmp_path, hugging_face) == ["no<|im_end|>"]
    chat["messages"][3]["weight"] = 0
    with pytest.raises(ValueError, match=r"no_supervised_turn \(none of assistant but with weight"):
        run(tmp_path, [chat], chats.CHATML, tokenizer_flags=flags)
    for weight in (0.5, 2, True, "1", [0]):
        chat["messages"][3]["weight"] = weight
        with pytest.raises(ValueError, match=r"bad_type \(messages\[3\]: weight is .* not 0 or 1"):
            run(tmp_path, [chat], chats.CHATML, tokenizer_flags=flags)


def test_an_empty_result_can_be_supervised(
    tmp_path: Path, flags: list[str], hugging_face: Any
) -> None:
    chat = chats.turns("a", "yes")
    chat["messages"].insert(1, {"role": "tool", "content": ""})
    options = {"tokenizer_flags": flags, "supervise_roles": ["tool", "assistant"]}
    run(tmp_path, [chat], chats.CHATML, **options)
    assert answers(tmp_path, hugging_face) == ["<|im_end|>", "yes<|im_end|>"]
    for split in (False, True):
        both = {"answer_end": "none", "split_at_spans": split}
        run(tmp_path, [chat], chats.CHATML, **options, **both)
        assert answers(tmp_path, hugging_face) == ["yes"]


def test_a_template_that_renders_otherwise_each_time(tmp_path: Path) -> None:
    clock = "{{ strftime_now('%H:%M:%S.%f') }}" + PLAIN.read_text()
    with pytest.raises(
        ValueError, match=r"1: the template renders the same chat otherwise each ti"
    ):
        run(tmp_path, [chats.turns("a", "yes")], clock)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"role": "human"}, r"First unknown_role: 0/a\.jsonl:1: messages\[0\]: 'human', not"),
        ({"content": ""}, r"First empty_turn: 0/a\.jsonl:1: messages\[0\]"),
    ],
)
def test_where_no_chat_is_left_the_commonest_reason_is_told(
    tmp_path: Path, change: dict[str, str], told: str
) -> None:
    lines: list[Any] = [chats.turns(f"a {i}", "yes") for i in range(3)]
    for line in lines:
        line["messages"][0] |= change
    with pytest.raises(ValueError, match=rf"None of 1 files .*: mend such documents.*{told}") as no:
        run(tmp_path, [*lines, {"text": "none"}], PLAIN, strict=False)
    assert "--suffix" not in str(no.value)


def test_a_role_that_no_chat_has_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = chats.write_lines(tmp_path / "a.jsonl", [chats.turns(f"a {i}", "b") for i in range(3)])
    line = f"--format chats --input {source} --output-prefix {tmp_path}/p --chat-template {PLAIN}"
    tool.main([*line.split(), "--supervise-roles", "assistant", "narrator"])
    warning = "warning: --supervise-roles: no chat has a turn of narrator\n"
    assert warning in capsys.readouterr().out
    more = ["--answer-end=none", "--overwrite", "--supervise-roles", "assistant", "user"]
    tool.main([*line.split(), *more])
    assert "warning" not in capsys.readouterr().out
    assert '"user": 3' in (tmp_path / "p.json").read_text()
