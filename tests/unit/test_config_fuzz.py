"""A fuzzer over config files: a clear error each time, or a run that means what the file says.

13 kinds of damage x 25 seeded mutations of a good config. Never a traceback, and never a file that
is accepted while something in it is ignored: what is accepted is compared with a second reading.
"""

import contextlib
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ranks import run_ranks

GOOD: dict[str, dict[str, Any]] = {
    "data": {
        "split": "80,20,0",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 258,
        "null_tokenizer_eod_id": 256,
    },
    "block_diffusion": {
        "diffusion_block_size": 4,
        "mask_token_id": 257,
        "noise_interval": [0.01, 0.9],
        "loss_weighting": "bound",
        "antithetic": True,
    },
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "seq_length": 61,
    },
    "training": {"global_batch_size": 4, "train_iters": 6, "lr": 0.01, "seed": 3},
    "evaluation": {"eval_interval": 3, "eval_iters": 2},
}
MUTATIONS = 25
Config = dict[str, dict[str, Any]]


def _pick(rng: random.Random, config: Config) -> tuple[dict[str, Any], str]:
    section = rng.choice(sorted(config))
    return config[section], rng.choice(sorted(config[section]))


def _typo(rng: random.Random, config: Config) -> str:
    entries, key = _pick(rng, config)
    place = rng.randrange(len(key))
    entries[key[:place] + rng.choice("abcxyz_") + key[place + rng.randrange(2) :]] = entries.pop(
        key
    )
    return yaml.safe_dump(config)


def _wrong_type(rng: random.Random, config: Config) -> str:
    entries, key = _pick(rng, config)
    entries[key] = rng.choice(["twelve", [1, 2], {"a": 1}, True, False, 1.5, "", "4 4", "1_0"])
    return yaml.safe_dump(config)


def _out_of_range(rng: random.Random, config: Config) -> str:
    entries, key = _pick(rng, config)
    entries[key] = rng.choice([-1, 0, -3.5, 10**12, 1e300, float("inf"), float("nan")])
    return yaml.safe_dump(config)


def _none(rng: random.Random, config: Config) -> str:
    entries, key = _pick(rng, config)
    entries[key] = None
    return yaml.safe_dump(config)


def _missing(rng: random.Random, config: Config) -> str:
    for _ in range(rng.randrange(1, 4)):
        entries, key = _pick(rng, config)
        if len(entries) > 1:
            del entries[key]
    return yaml.safe_dump(config)


def _twice(rng: random.Random, config: Config) -> str:
    entries, key = _pick(rng, config)
    text = yaml.safe_dump(config)
    return text + f"more:\n  {key}: {entries[key]}\n"


def _nested(rng: random.Random, config: Config) -> str:
    section = rng.choice(sorted(config))
    config[section] = {"deeper": config[section]}
    return yaml.safe_dump(config)


def _flat(rng: random.Random, config: Config) -> str:
    section = rng.choice(sorted(config))
    return yaml.safe_dump(config | config.pop(section))


def _cut(rng: random.Random, config: Config) -> str:
    text = yaml.safe_dump(config)
    return text[: rng.randrange(1, len(text))]


def _noise(rng: random.Random, config: Config) -> str:
    text = list(yaml.safe_dump(config))
    for _ in range(rng.randrange(1, 4)):
        text[rng.randrange(len(text))] = rng.choice("\t:{}[]&*!|>'\"%@`#-,? \n\x00\x7f")
    return "".join(text)


def _bytes(rng: random.Random, config: Config) -> bytes:
    data = bytearray(yaml.safe_dump(config).encode())
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(128, 256)
    return bytes(data)


def _swapped(rng: random.Random, config: Config) -> str:
    (first, a), (second, b) = _pick(rng, config), _pick(rng, config)
    first[a], second[b] = second[b], first[a]
    return yaml.safe_dump(config)


def _not_a_mapping(rng: random.Random, config: Config) -> str:
    return rng.choice(
        ["- a\n- b\n", "7\n", "text\n", "[]\n", "", "null\n", "--- 1\n--- 2\n", "!!x 1\n"]
    )


KINDS: dict[str, Callable[[random.Random, Config], str | bytes]] = {
    "typo": _typo,
    "wrong type": _wrong_type,
    "out of range": _out_of_range,
    "none": _none,
    "missing": _missing,
    "twice": _twice,
    "nested": _nested,
    "flat": _flat,
    "cut": _cut,
    "noise": _noise,
    "bytes": _bytes,
    "swapped": _swapped,
    "not a mapping": _not_a_mapping,
}


def mutations(kind: str) -> list[bytes]:
    import copy

    made = []
    for number in range(MUTATIONS):
        text = KINDS[kind](random.Random(f"{kind} {number}"), copy.deepcopy(GOOD))
        made.append(text if isinstance(text, bytes) else text.encode())
    return made


def outcomes(
    rank: int, world: int, folder: str, prefix: str, texts: list[bytes]
) -> list[tuple[str, Any]]:
    """What `arguments.parse` does: ("refused", [line]), ("ran", values), ("raised", what)."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training import global_vars

    from megatron_bp import arguments

    found: list[tuple[str, Any]] = []
    for number, text in enumerate(texts):
        path = Path(folder) / f"{number}.yaml"
        path.write_bytes(text)
        shown = io.StringIO()
        try:
            with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(io.StringIO()):
                args = arguments.parse([str(path), "--data-path", prefix])
            found.append(("ran", {k: _plain(v) for k, v in vars(args).items()}))
        except SystemExit as end:
            lines = [x for x in shown.getvalue().splitlines() if "error:" in x]
            found.append(("refused" if end.code == 2 and lines else "silent", lines[-1:]))
        except BaseException as error:
            found.append(("raised", f"{type(error).__name__}: {error}"))
        finally:
            global_vars.unset_global_variables()
            destroy_num_microbatches_calculator()
    return found


def _plain(value: Any) -> Any:
    value = getattr(value, "name", value)
    return value if isinstance(value, bool | int | float | str | list | None) else str(value)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    from megatron_bp.tools.prepare import Options, prepare

    folder = tmp_path_factory.mktemp("fuzz")
    texts = folder / "texts"
    texts.mkdir()
    for i in range(4):
        words = np.random.default_rng(i).choice(["red ", "green "], 100)
        (texts / f"{i}.txt").write_text("".join(words))
    prepare(Options(input=[texts], output_prefix=folder / "words"))
    return str(folder / "words")


# Where the run holds a value under another name than the file.
ELSEWHERE = {"seq_length": "bdlm_seq_length"}
SWITCHES = {"swiglu", "antithetic"}


def ignored(text: bytes, args: dict[str, Any]) -> list[str]:
    """Keys of an accepted file whose value the run does not have."""
    read = yaml.safe_load(text) or {}
    wrong = []
    for entries in read.values():
        for key, value in (entries or {}).items():
            if value is None or (key in SWITCHES and value is False):
                continue
            have = args.get(ELSEWHERE.get(key, key), "nowhere")
            if isinstance(have, list) and not isinstance(value, list):
                value = str(value).split()
            pairs = zip(have, value, strict=False) if isinstance(have, list) else [(have, value)]
            if not all(_same(a, b) for a, b in pairs):
                wrong.append(f"{key}: {value!r} became {have!r}")
    return wrong


def _same(have: Any, value: Any) -> bool:
    try:
        return have == value or float(have) == float(value)
    except (TypeError, ValueError):
        return str(have) == str(value)


@pytest.mark.ranks
def test_the_good_config_is_accepted_as_it_stands(prefix: str, tmp_path: Path) -> None:
    text = yaml.safe_dump(GOOD).encode()
    ((outcome, args),) = run_ranks(1, outcomes, str(tmp_path), prefix, [text])[0]
    assert outcome == "ran", args
    assert ignored(text, args) == []
    assert ignored(text.replace(b"seed: 3", b"seed: 4"), args) == ["seed: 4 became 3"]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_told_or_means_what_it_says(kind: str, prefix: str, tmp_path: Path) -> None:
    texts = mutations(kind)
    results = run_ranks(1, outcomes, str(tmp_path), prefix, texts, timeout=300)[0]
    bad = []
    for text, (outcome, told) in zip(texts, results, strict=True):
        if outcome == "ran":
            wrong = ignored(text, told)
            if wrong:
                bad.append(f"ignored {wrong} of:\n{text.decode()}")
        elif outcome != "refused" or len(told[0]) > 2000:
            bad.append(f"{outcome} {told} on:\n{text!r}")
    assert not bad, f"{len(bad)} of {len(texts)}:\n" + "\n".join(bad)
