"""prepare --format chats: where a mask would be wrong in silence, an error or another way instead."""

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
    "composed": (normalizers.NFC(), "caf e", "\u0301 yes"),
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
        ("caf e\u0301", " the answer \ufb01"),
        ("A\u00e9", "A\u00e9 q\u0323\u0307"),
        ("assistant\n", "q"),
        ("e<e>", "\u0301 <e>\u0301"),  # the tokens keep them apart
        ("\n\n <|", "\n <e>"),
    ):
        assert seen.joins(left + right, len(left)) is None
        assert seen.joins("e<e>" + left + right, 4 + len(left)) is None
