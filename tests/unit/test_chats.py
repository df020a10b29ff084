"""prepare --format chats: what is supervised, by decoding it, under templates of four formats."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import templates as chats

from megatron_bp.data.checks import check_indexed, document_bytes
from megatron_bp.tools import prepare as tool
from megatron_bp.tools.prepare import EOD_ID, Options, reading

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "configs/templates/plain.jinja"
EMOJI = "\u00e9t\u00e9 \U0001f600\U0001f468\u200d\U0001f469 \u4f60\u597d"
FOUR = list(chats.TEMPLATES)


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
        path = folder / "t.jinja"
        path.write_text(template)
        template = path
    source = chats.write_lines(folder / "a.jsonl", lines)
    given = {"format": "chats", "chat_template": template, "overwrite": True, "strict": True}
    return tool.prepare(Options([source], folder / "p", **(given | options)))


def answers(folder: Path, hugging_face: Any) -> list[str]:
    """The supervised runs of the one document of folder/p, decoded."""
    ((ids, mask),) = chats.read(folder / "p")
    return [hugging_face.decode(x) for x in chats.runs(ids, mask)]


# --- bytes, by hand -------------------------------------------------------------------------------


def test_bytes_by_hand(tmp_path: Path) -> None:
    """Plain template: the prompt as it is, the answer, the end of document."""
    one = {"prompt": "\u00e9b", "completion": "\u00e9 "}  # c3 a9 62 | c3 a9 20, then 256
    result = run(tmp_path, [one], PLAIN)
    ((ids, mask),) = chats.read(tmp_path / "p")
    assert ids == [0xC3, 0xA9, 0x62, 0xC3, 0xA9, 0x20, EOD_ID]
    assert mask == [False, False, False, True, True, True, True]
    assert np.load(tmp_path / "p.supervised.npy").tolist() == [0b1111000]
    assert np.load(tmp_path / "p.bytes.npy").tolist() == [3]  # not the prompt's three, nor the end
    want = {"kind": "chats", "documents": 1, "tokens": 7, "bytes": 3}
    want |= {
        "supervised_tokens": 4,
        "supervised_turns": 1,
        "sample": "\u00e9b>>>\u00e9 <|endoftext|><<<",
    }
    assert {name: result[name] for name in want} == want
    assert result["unigram_bits_per_token"] == 2.0  # of the four supervised ids alone
    assert result["unigram_bits_per_byte"] == round(4 * 2 / 3, 6)
    assert check_indexed(str(tmp_path / "p"), 258, mask=257).checksum == "verified"


def test_mask_of_many_documents_in_their_order(tmp_path: Path) -> None:
    """Lengths that are no multiples of 8: bits of one byte belong to several documents."""
    lines = [{"prompt": "p" * (i % 5 + 1), "completion": f"{i:03}"[: i % 3 + 1] + "x" * (i % 7)}
             for i in range(60)]  # fmt: skip
    run(tmp_path, lines, PLAIN)
    found = set()
    for ids, mask in chats.read(tmp_path / "p"):
        text = bytes(x for x in ids if x < 256).decode()
        prompt = len(text) - len(text.lstrip("p"))
        assert mask == [i >= prompt for i in range(len(ids))]
        found.add(text)
    assert found == {x["prompt"] + x["completion"] for x in lines}
    assert (
        chats.unpacked(tmp_path / "p")[check_indexed(str(tmp_path / "p"), 258).tokens :].sum() == 0
    )


def test_sample_of_the_first_document_and_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [chats.turns(f"question {i}", f"answer {i}") for i in range(20)]
    source = chats.write_lines(tmp_path / "a.jsonl", lines)
    line = f"--format chats --input {source} --output-prefix {tmp_path}/p --chat-template {PLAIN}"
    tool.main([*line.split(), "--seed", "7"])
    told = capsys.readouterr().out
    ids, _ = chats.read(tmp_path / "p")[0]
    number = bytes(ids[:-1]).decode().split()[-1]
    sample = f"question {number}>>>answer {number}<|endoftext|><<<"
    assert told.endswith(f"in >>> <<<:\n{sample}\n")
    assert "20 documents" in told
    assert "supervised in 20 turns" in told
    assert json.loads((tmp_path / "p.json").read_text())["sample"] == sample


def test_a_long_sample_is_cut_short(tmp_path: Path) -> None:
    chat = chats.turns(*(x * 5000 for x in "abcd" * 30))
    sample = run(tmp_path, [chat], PLAIN)["sample"]
    assert "[... 4400 characters ...]" in sample
    assert sample.endswith("[40 more supervised turns]")
    assert len(sample) < 40_000


# --- four formats ---------------------------------------------------------------------------------

CONTENTS = {
    "one turn": ("Hello!", "the answer is yes"),
    "several": ("a", "yes, or no.", "b", "no", "c", "system"),
    "unicode": (EMOJI, EMOJI + "\u00e9", "\U0001f600", "\U0001f468\u200d\U0001f469"),
    "lines": ("a\nb", "one\n\ntwo\n    three"),
    "like a header": ("assistant\n", "assistant\nuser\n### answer: no"),
    "equal texts": ("yes", "yes", "yes", "yes"),
    "blank at the ends": ("  a ", "  the answer \n", " b", "\tyes \n\n "),
}


@pytest.mark.parametrize("system", [None, "the system"])
@pytest.mark.parametrize("contents", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("name", FOUR)
def test_decodes_to_answer_and_end(
    tmp_path: Path,
    flags: list[str],
    hugging_face: Any,
    name: str,
    contents: tuple[str, ...],
    system: str | None,
) -> None:
    chat = chats.turns(*contents, system=system)
    split = contents[0] == "  a "  # blanks would join those of the headers: see below
    template = chats.TEMPLATES[name]
    result = run(tmp_path, [chat], template, tokenizer_flags=flags, split_at_spans=split)
    want = [chats.FORMS[name](x) for x in contents[1::2]]
    assert answers(tmp_path, hugging_face) == [x + chats.ENDS[name] for x in want]
    ((ids, _),) = chats.read(tmp_path / "p")
    rendered = hugging_face.apply_chat_template(
        chat["messages"], chat_template=template, tokenize=False
    )
    assert hugging_face.decode(ids) == rendered
    if not split:
        assert ids == hugging_face(rendered, add_special_tokens=False).input_ids
    size = document_bytes(str(tmp_path / "p"))
    assert size is not None
    assert size.tolist() == [sum(len(x.encode()) for x in want)]
    assert result["supervised_turns"] == len(want)
    marked = rendered
    for x in want:  # in the sample exactly the same stands between the marks
        assert f">>>{x}{chats.ENDS[name]}<<<" in result["sample"]
    assert result["sample"].replace(">>>", "").replace("<<<", "") == marked


@pytest.mark.parametrize("name", FOUR)
def test_the_last_turn_only(tmp_path: Path, flags: list[str], hugging_face: Any, name: str) -> None:
    chat = chats.turns("a", "first", "b", "second", "c")  # also when a question comes after it
    run(tmp_path, [chat], chats.TEMPLATES[name], tokenizer_flags=flags, supervise="last")
    assert answers(tmp_path, hugging_face) == ["second" + chats.ENDS[name]]


def test_by_role(tmp_path: Path, flags: list[str], hugging_face: Any) -> None:
    chat = chats.turns("a b", "first", "c d", "second", system="be kind")
    options = {"tokenizer_flags": flags, "supervise_roles": ["user", "system"]}
    run(tmp_path, [chat], chats.CHATML, **options)
    assert answers(tmp_path, hugging_face) == [f"{x}<|im_end|>" for x in ("be kind", "a b", "c d")]
    run(tmp_path, [chat], chats.CHATML, **options, supervise="last")
    assert answers(tmp_path, hugging_face) == ["c d<|im_end|>"]
    chat["messages"][0]["role"] = "narrator"  # a role that is named is known
    run(tmp_path, [chat], chats.CHATML, tokenizer_flags=flags, supervise_roles=["narrator"])
    assert answers(tmp_path, hugging_face) == ["be kind<|im_end|>"]


def test_a_prompt_is_never_supervised(tmp_path: Path, flags: list[str], hugging_face: Any) -> None:
    messages = chats.turns("a", "shot", "b", "more", "c", "last")["messages"]
    chat = {"prompt": messages[:3], "completion": messages[3:]}
    run(tmp_path, [chat], chats.CHATML, tokenizer_flags=flags)
    assert answers(tmp_path, hugging_face) == ["more<|im_end|>", "last<|im_end|>"]
    chat = {"prompt": messages[:3], "completion": "text"}
    run(tmp_path, [chat], chats.CHATML, tokenizer_flags=flags)
    assert answers(tmp_path, hugging_face) == ["text<|im_end|>"]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "of two"}}]


@pytest.mark.parametrize("content", [None, "", "I add them."])
@pytest.mark.parametrize("end", ["turn", "none"])
def test_tool_calls(
    tmp_path: Path, flags: list[str], hugging_face: Any, content: str | None, end: str
) -> None:
    call = {"role": "assistant", "content": content, "tool_calls": [CALL, CALL]}
    messages = [
        {"role": "user", "content": "1 and 2?"},
        call,
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "3", "tool_calls": []},
    ]
    run(
        tmp_path,
        [{"messages": messages, "tools": TOOLS}],
        chats.CHATML,
        tokenizer_flags=flags,
        answer_end=end,
    )
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}\n</tool_call>'
    ends = "<|im_end|>" * (end == "turn")
    want = [f"{content or ''}{one}\n{one}{ends}", f"3{ends}"]
    assert answers(tmp_path, hugging_face) == want
    ((ids, _),) = chats.read(tmp_path / "p")
    assert "of two" in hugging_face.decode(ids).split("<|im_end|>")[0]
    size = document_bytes(str(tmp_path / "p"))
    assert size is not None
    assert size[0] == len("".join(want).encode()) - 2 * len(ends)


@pytest.mark.parametrize("name", FOUR)
def test_ends(tmp_path: Path, flags: list[str], hugging_face: Any, name: str) -> None:
    template, options = chats.TEMPLATES[name], {"tokenizer_flags": flags}
    chat = chats.turns("a", "first", "b", "second")
    run(tmp_path, [chat], template, answer_end="none", **options)
    assert answers(tmp_path, hugging_face) == ["first", "second"]
    run(tmp_path, [chat], template, answer_end="eos", **options)
    assert answers(tmp_path, hugging_face) == ["first", "second<|eos|>"]
    ((ids, mask),) = chats.read(tmp_path / "p")
    assert ids[-1] == hugging_face.eos_token_id  # in the place of what the template puts there
    assert mask[-1]
    chat["messages"].append({"role": "user", "content": "c"})  # the last turn is not supervised
    run(tmp_path, [chat], template, answer_end="eos", **options)
    assert answers(tmp_path, hugging_face) == ["first", "second"]
    ((ids, mask),) = chats.read(tmp_path / "p")
    assert "c" in hugging_face.decode(ids[-6:])


def test_a_token_after_the_last_turn_alone_is_no_other_history(
    tmp_path: Path, flags: list[str], hugging_face: Any
) -> None:
    """It starts as the next turn's own token does: "<|"."""
    last = (
        "{% if loop.last and m.role == 'assistant' %}<|eos|>{% endif %}\n{%- endfor %}\n{%- if add"
    )
    template = chats.CHATML.replace("{%- endfor %}\n{%- if add", last)
    assert template != chats.CHATML
    chat = chats.turns("a", "yes", "b", "no")
    run(tmp_path, [chat], template, tokenizer_flags=flags)
    # Blanks alone are between it and the end of the last turn: it ends that turn, too.
    assert answers(tmp_path, hugging_face) == ["yes<|im_end|>", "no<|im_end|>\n\n<|eos|>"]
    ((ids, mask),) = chats.read(tmp_path / "p")
    assert (ids[-1], mask[-1]) == (hugging_face.eos_token_id, True)


def test_offsets_without_blanks_do_not_hide_a_token_on_both_sides(tmp_path: Path) -> None:
    """A tokenizer that trims offsets tells of the token " yes" the word alone."""
    from transformers import AutoTokenizer

    for trim in (False, True):
        folder = tmp_path / str(trim)
        folder.mkdir()
        flags = chats.save_tokenizer(folder / "tokenizer", trim)
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        (double,) = tokenizer("\n\n", add_special_tokens=False).input_ids
        chat = chats.turns("a", "\n\nyes")
        message = rf"0/a\.jsonl:1: token {double} stands for '\\n' before and '\\n' after .*starts"
        with pytest.raises(ValueError, match=f"{message}.*--split-at-spans"):
            run(folder, [chat], chats.CHATML, tokenizer_flags=flags)
        run(folder, [chat], chats.CHATML, tokenizer_flags=flags, split_at_spans=True)
        assert answers(folder, tokenizer) == ["\n\nyes<|im_end|>"]
        (chat,) = [chats.turns(" a", "yes", " b", " the answer")]
        run(folder, [chat], chats.CHATML, tokenizer_flags=flags)
        assert answers(folder, tokenizer) == ["yes<|im_end|>", " the answer<|im_end|>"]
        loose = chats.CHATML.replace("<|im_end|>\n'", "\n'")  # the end joins what follows
        blank = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
        blank += "{% if add_generation_prompt %}assistant: {% endif %}"
        with pytest.raises(ValueError, match=r"stands for ' ' before and 'yes' after .* starts"):
            run(folder, [chats.turns("a", "yes")], blank, tokenizer_flags=flags)
        chat = chats.turns("a", "Hello!\n", "b", "yes\n")
        with pytest.raises(ValueError, match=r"before and '\\n' after the place .* ends; with"):
            run(folder, [chat], loose, tokenizer_flags=flags, answer_end="none")


def test_a_tokenizer_that_marks_the_start_of_a_piece_is_not_split(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    special = ["<|im_end|>", "<|im_start|>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    unigram.train_from_iterator([chats.WORDS] * 9, trainer)
    PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token=special[0]).save_pretrained(
        tmp_path / "tokenizer"
    )
    flags = ["--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={tmp_path}/tokenizer"]
    with pytest.raises(ValueError, match=r"--split-at-spans: the tokenizer makes .* of 'a.n' and"):
        run(tmp_path, [chats.turns("a", "b")], chats.CHATML, tokenizer_flags=flags,
            split_at_spans=True)  # fmt: skip


def test_the_tokenizers_own_template(tmp_path: Path, flags: list[str], hugging_face: Any) -> None:
    import copy

    own = copy.deepcopy(hugging_face)
    own.chat_template = chats.LLAMA
    own.save_pretrained(tmp_path / "own")
    options = {"tokenizer_flags": [*flags[:-1], str(tmp_path / "own")], "chat_template": None}
    result = run(tmp_path, [chats.turns("a", "yes")], "", **options)
    assert answers(tmp_path, hugging_face) == ["yes<|eot_id|>"]
    assert result["template"]["name"] == "the tokenizer's own"
    with pytest.raises(ValueError, match="has no chat template; give one with --chat-template"):
        run(tmp_path, [chats.turns("a", "yes")], "", **(options | {"tokenizer_flags": flags}))


# --- the rest of the pipeline ---------------------------------------------------------------------


def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH_ITEMS", 7)
    lines: list[Any] = [
        chats.turns(f"a {i % 40}", f"yes {i % 40}" * (i % 8 + 1)) for i in range(90)
    ]
    lines[3:5] = [{}, {"messages": []}]
    contents = []
    for workers in (1, 2):
        options = {"tokenizer_flags": flags, "workers": workers, "strict": False}
        result = run(tmp_path, lines, chats.CHATML, **options)
        assert result["skipped"].keys() == {"duplicate", "no_messages", "not_a_chat"}
        contents.append([Path(f"{tmp_path}/p{x}").read_bytes() for x in tool.ALL_ENDINGS])
    assert contents[0] == contents[1]


def test_equal_chats_are_one_and_other_spans_are_not(tmp_path: Path) -> None:
    split = {"messages": [{"role": "user", "content": x} for x in "ab"]}
    split["messages"].append({"role": "assistant", "content": "c"})
    one = {"prompt": "ab", "completion": "c"}
    other = {"prompt": "a", "completion": "bc"}
    result = run(tmp_path, [split, one, other, {"id": 7} | one], PLAIN)
    assert result["skipped"] == {"duplicate": 2}
    masks = sorted(mask for _, mask in chats.read(tmp_path / "p"))
    assert masks == [[False, False, True, True], [False, True, True, True]]


def test_texts_have_no_mask_and_replace_one(tmp_path: Path) -> None:
    run(tmp_path, [chats.turns("a", "yes")], PLAIN)
    assert (tmp_path / "p.supervised.npy").exists()
    source = tmp_path / "a.txt"
    source.write_text("text")
    with pytest.raises(ValueError, match=r"p\.supervised\.npy exists"):
        tool.prepare(Options([source], tmp_path / "p"))
    result = tool.prepare(Options([source], tmp_path / "p", overwrite=True))
    assert result["kind"] == "text"
    assert not (tmp_path / "p.supervised.npy").exists()
    check_indexed(str(tmp_path / "p"), 258)


def test_max_bytes_counts_supervised_text(tmp_path: Path) -> None:
    lines = [chats.turns("question" * 9, f"{i:04}") for i in range(20)]
    run(tmp_path, lines, PLAIN)
    every = chats.read(tmp_path / "p")
    result = run(tmp_path, lines, PLAIN, max_bytes=9)
    assert (result["documents"], result["bytes"]) == (3, 12)
    assert chats.read(tmp_path / "p") == every[:3]
