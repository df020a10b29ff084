"""Seeded damage to files of chats: a counted skip, or with --strict an error with file and line.

Nothing may end in a traceback, and no mask may be wrong: what is sound is told by this file's own
reading of a line, and its ids and mask are written down by hand under the plain template.
"""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import templates as chats

from megatron_bp.data.checks import check_indexed
from megatron_bp.tools import prepare as tool
from megatron_bp.tools.prepare import EOD_ID, Options

SEEDS = range(25)
PLAIN = Path(__file__).parents[2] / "configs/templates/plain.jinja"
EOD = "<|endoftext|>"
LONGEST = 3000
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Rng = np.random.Generator


# --- what is sound, by hand -----------------------------------------------------------------------


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [x for k, v in value.items() for x in [k, *texts(v)]]
    if isinstance(value, list):
        return [x for v in value for x in texts(v)]
    return [value] if isinstance(value, str) else []


def sound(line: bytes) -> tuple[tuple[int, ...], tuple[bool, ...]] | None:
    """(ids, mask) of a line under the plain template; None if it has a flaw."""
    try:
        chat = json.loads(line.decode())
        first = 0
        if "messages" in chat:
            assert not {"prompt", "completion"} & chat.keys()
            messages = chat["messages"]
        else:
            sides = [chat["prompt"], chat["completion"]]
            for i, role in enumerate(("user", "assistant")):
                if isinstance(sides[i], str):
                    sides[i] = [{"role": role, "content": sides[i]}]
                assert isinstance(sides[i], list)
                assert sides[i]
            messages, first = sides[0] + sides[1], len(sides[0])
        assert isinstance(messages, list)
        assert isinstance(chat.get("tools") or [], list)
        assert all(isinstance(x, dict) for x in chat.get("tools") or [])
        checked = list(messages) + (chat.get("tools") or [])
        for text in texts(checked):
            text.encode()
            assert "\0" not in text
            assert EOD not in text
        ids: list[int] = []
        mask: list[bool] = []
        for i, message in enumerate(messages):
            role, content = message["role"], message["content"]
            assert role in ROLES
            assert isinstance(content, str)
            assert content.strip() or role in ("tool", "function")
            assert message.get("tool_calls") in (None, [])
            plain = {k: v for k, v in message.items() if v is not None}
            plain.pop("tool_calls", None)
            assert len("\n".join(texts(plain)).encode()) <= LONGEST
            answer = role == "assistant"
            ids += [*content.encode(), *[EOD_ID] * answer]
            mask += [answer and i >= first] * (len(content.encode()) + answer)
        assert any(mask)
    except Exception:
        return None
    return tuple(ids), tuple(mask)


# --- damage ---------------------------------------------------------------------------------------

WORDS = ["red", "green \u00e9t\u00e9", 'say "x"', "\U0001f600 tab\t", "\\u back", "end\n\n", "  "]


def text(rng: Rng) -> str:
    return " ".join(rng.choice(WORDS, int(rng.integers(1, 9)))) + f" {rng.integers(1 << 40)}"


def chat(rng: Rng) -> dict[str, Any]:
    if rng.integers(0, 3) == 0:
        return {"prompt": text(rng), "completion": text(rng), "id": int(rng.integers(99))}
    one = chats.turns(*(text(rng) for _ in range(2 * int(rng.integers(1, 4)))))
    if rng.integers(0, 2):
        one["messages"].insert(0, {"role": "system", "content": text(rng)})
        one["tools"] = [{"name": "f", "description": text(rng)}]
    return one


def dump(values: list[Any]) -> bytes:
    return b"".join(json.dumps(x).encode() + b"\n" for x in values)


def message_of(rng: Rng, one: dict[str, Any]) -> dict[str, Any]:
    if "messages" not in one:
        one.update(chats.turns(one.pop("prompt"), one.pop("completion")))
    return one["messages"][int(rng.integers(0, len(one["messages"])))]


def on_a_message(change: Callable[[Rng, dict[str, Any]], None]) -> Callable[[Rng], bytes]:
    """Damage that changes a message of some of the chats."""

    def damage(rng: Rng) -> bytes:
        every = [chat(rng) for _ in range(7)]
        for i in rng.choice(7, int(rng.integers(1, 4)), replace=False):
            change(rng, message_of(rng, every[i]))
        return dump(every)

    return damage


def bad_json(rng: Rng) -> bytes:
    content = bytearray(dump([chat(rng) for _ in range(7)]))
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(0, len(content)))
        how = rng.integers(0, 3)
        if how == 0:
            del content[at : at + int(rng.integers(1, 30))]
        elif how == 1:
            content[at:at] = rng.choice([b'"', b"}", b"[", b"\\", b"\n", b"{}", b"nan", b",", b"]"])
        else:
            content[at] = int(rng.integers(0, 256))
    return bytes(content)


def no_object(rng: Rng) -> bytes:
    every: list[Any] = [chat(rng) for _ in range(7)]
    for i in rng.choice(7, int(rng.integers(1, 4)), replace=False):
        others = [None, 3, "text", [every[i]], {}, True, {"text": "a"}, every[i].get("messages")]
        every[i] = others[int(rng.integers(0, len(others)))]
    return dump(every)


def drop(rng: Rng, message: dict[str, Any]) -> None:
    name = str(rng.choice(["role", "content"]))
    if rng.integers(0, 3) == 0:
        message[name] = None
    else:
        del message[name]


def retype(rng: Rng) -> bytes:
    """Any value of a chat becomes one of another type."""
    every = [chat(rng) for _ in range(7)]
    for i in rng.choice(7, int(rng.integers(1, 4)), replace=False):
        places: list[tuple[Any, Any]] = [(every[i], k) for k in every[i]]
        for name in ("messages", "tools"):
            for j, x in enumerate(every[i].get(name, [])):
                places += [(every[i][name], j), *((x, k) for k in x)]
        where, key = places[int(rng.integers(0, len(places)))]
        values: list[Any] = [None, 7, 0.5, True, [], {}, ["a"], {"a": 1}, "", [{}], [[]]]
        where[key] = values[int(rng.integers(0, len(values)))]
    return dump(every)


def empty(rng: Rng, message: dict[str, Any]) -> None:
    message["content"] = str(rng.choice(["", " ", "\n", "\t \r\n", "\u00a0", "\u3000"]))


def role(rng: Rng, message: dict[str, Any]) -> None:
    message["role"] = str(rng.choice(["robot", "", "User", "assistant ", "gpt", "human", "tool"]))


def unicode(rng: Rng) -> bytes:
    content = bytearray(dump([chat(rng) for _ in range(7)]))
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, len(content)))
        if rng.integers(0, 2):
            content[at] = int(rng.integers(128, 256))
        else:
            at = content.find(b" ", at) if b" " in content[at:] else at
            content[at:at] = rng.choice(
                [b"\\ud83d", b"\\udc00", b"\\ud83d\\ude00", b"\xef\xbb\xbf"]
            )
    return bytes(content)


def nul(rng: Rng, message: dict[str, Any]) -> None:
    at = int(rng.integers(0, len(message["content"]) + 1))
    message["content"] = f"{message['content'][:at]}\0{message['content'][at:]}"


def huge(rng: Rng, message: dict[str, Any]) -> None:
    size = LONGEST + int(rng.integers(-60, 60))  # some are not
    message["content"] = (message["content"] + "\u00e9" * size)[: int(size // 2)]


def special(rng: Rng, message: dict[str, Any]) -> None:
    at = int(rng.integers(0, len(message["content"]) + 1))
    piece = EOD if rng.integers(0, 3) else EOD[: int(rng.integers(1, len(EOD)))]
    message["content"] = message["content"][:at] + piece + message["content"][at:]


def unanswered(rng: Rng) -> bytes:
    every = [chat(rng) for _ in range(7)]
    for i in rng.choice(7, int(rng.integers(1, 4)), replace=False):
        if "messages" not in every[i]:
            every[i] = chats.turns(text(rng))
        keep = [x for x in every[i]["messages"] if x["role"] != "assistant"]
        every[i]["messages"] = keep[: int(rng.integers(0, 3))]
    return dump(every)


def cut(rng: Rng) -> bytes:
    content = dump([chat(rng) for _ in range(7)])
    return content[: int(rng.integers(1, len(content)))]


def bad_gzip(rng: Rng) -> bytes:
    content = bytearray(gzip.compress(dump([chat(rng) for _ in range(20)]), mtime=0))
    how = rng.integers(0, 3)
    if how == 0:
        del content[int(rng.integers(1, len(content))) :]
    elif how == 1:
        content += rng.bytes(int(rng.integers(1, 20)))
    else:
        content[int(rng.integers(10, len(content)))] ^= int(rng.integers(1, 256))
    return bytes(content)


KINDS: dict[str, Callable[[Rng], bytes]] = {
    "bad json": bad_json,
    "no object": no_object,
    "missing": on_a_message(drop),
    "types": retype,
    "empty turns": on_a_message(empty),
    "roles": on_a_message(role),
    "unicode": unicode,
    "nul": on_a_message(nul),
    "huge turns": on_a_message(huge),
    "special tokens": on_a_message(special),
    "unanswered": unanswered,
    "cut": cut,
    "gzip": bad_gzip,
}


def lines_of(content: bytes, gzipped: bool) -> list[tuple[int, bytes]] | None:
    """(number, line) of those that are not blank; None for a damaged gzip."""
    if gzipped:
        try:
            content = gzip.decompress(content)
        except Exception:
            return None
    content = content.removeprefix(b"\xef\xbb\xbf")
    every = enumerate(content.split(b"\n"), 1)
    return [(i, x.rstrip(b"\r\n")) for i, x in every if x.strip()]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_chats_are_counted_and_the_others_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, seed: int
) -> None:
    rng = np.random.default_rng((seed, len(kind)))
    tree = tmp_path / "tree"
    tree.mkdir()
    good = [chat(np.random.default_rng((seed, i))) for i in range(3)]
    (tree / "a.jsonl").write_bytes(dump(good))
    name = "b.jsonl.gz" if kind == "gzip" else "b.jsonl"
    (tree / name).write_bytes(KINDS[kind](rng))

    lines = lines_of((tree / name).read_bytes(), kind == "gzip")
    truth = {i: sound(line) for i, line in lines or []}
    flawed = [i for i, one in truth.items() if one is None] if lines is not None else [None]
    want = {sound(json.dumps(x).encode()) for x in good}
    assert None not in want
    want |= set(truth.values()) - {None}

    options = {"format": "chats", "chat_template": PLAIN, "max_turn_bytes": LONGEST}
    result = tool.prepare(Options([tree], tmp_path / "p", **options))
    got = {(tuple(ids), tuple(mask)) for ids, mask in chats.read(tmp_path / "p")}
    assert got == want
    assert check_indexed(str(tmp_path / "p"), 258).checksum == "verified"
    skipped = dict(result["skipped"])
    skipped.pop("duplicate", 0)
    assert sum(skipped.values()) == len(flawed)
    if len(flawed) <= 3 and lines is not None:
        places = [x for reason in skipped for x in result["skipped_places"][reason]]
        assert sorted(places) == sorted(f"1/{name}:{i}".replace("1/", "0/") for i in flawed)

    command = ["--format=chats", f"--input={tree}", f"--output-prefix={tmp_path}/q", "--strict"]
    command += [f"--chat-template={PLAIN}", f"--max-turn-bytes={LONGEST}"]
    if not flawed:
        tool.main(command)
        return
    with pytest.raises(SystemExit) as error:
        tool.main(command)
    told = str(error.value.code)
    line = r"(:\d+)?" if lines is None else f":{flawed[0]}"
    assert re.match(rf"^prepare: error: 0/{re.escape(name)}{line}: [a-z0-9_]+[^\n]*; mend it", told)
    assert "\n" not in told
    assert not list(tmp_path.glob("*q*"))


def test_every_kind_breaks_something() -> None:
    """A kind that left all lines sound would test nothing."""
    for kind, damage in KINDS.items():
        broken = 0
        for seed in SEEDS:
            content = damage(np.random.default_rng((seed, len(kind))))
            lines = lines_of(content, kind == "gzip")
            broken += lines is None or any(sound(x) is None for _, x in lines)
        assert broken >= 12, kind
