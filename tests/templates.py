"""Chat templates in the formats of known models, a tokenizer with their special tokens, reading.

The templates are written for these tests, in the formats' spirit; the tokenizer is trained here.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_bp.data.supervised import supervised_of

# ChatML: header, line, content, end. Tools in front, calls as lines of JSON.
CHATML = """
{%- if tools -%}
<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n
{%- endif -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}
{%- if not loop.last %}{{ '\n' }}{% endif %}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The headers of Llama 3; content is trimmed.
LLAMA = """{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}
{{- m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Gemma: the assistant is the model, a system text goes before the first user's; turns alternate.
GEMMA = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}
{%- else %}
{%- if loop.previtem is defined and loop.previtem.role == m.role %}
{{- raise_exception('turns must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- ns.system + m.content | trim + '<end_of_turn>\n' }}
{%- set ns.system = '' %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# No special tokens but the end of an answer; strips on the right only, and a blank before the end.
PLAIN_WORDS = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ m.content.rstrip() + '\n' + eos_token }}
{%- else %}{{ '### ' + m.role + ': ' + m.content.strip() + '\n### answer:\n' }}{% endif %}
{%- endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "words": PLAIN_WORDS}
ENDS = {
    "chatml": "<|im_end|>",
    "llama": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "words": "\n<|eos|>",
}
# What each makes of a content.
FORMS = {"chatml": str, "llama": str.strip, "gemma": str.strip, "words": str.rstrip}

SPECIAL = ["<|eos|>", "<|bos|>", "<|mask|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>"]
SPECIAL += ["<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
WORDS = (
    "user\n assistant\n\n system: the answer is yes, or no.\n\n\n  Hello! {'name': 'f'}\n### a: b "
)


def save_tokenizer(folder: Path, trim: bool = False, normalizer: Any = None) -> list[str]:
    """Saves a byte-level BPE; returns the flags for it. `trim`: offsets without their blanks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if normalizer is not None:
        bpe.normalizer = normalizer
    bpe.post_processor = processors.ByteLevel(trim_offsets=trim)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([WORDS] * 9, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|eos|>",
        bos_token="<|bos|>",
        mask_token="<|mask|>",
        extra_special_tokens=SPECIAL[3:],
    )
    fast.save_pretrained(folder)
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path


def turns(*contents: str, system: str | None = None) -> dict[str, Any]:
    """A chat of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": x} for i, x in enumerate(contents)]
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": first + messages}


def read(prefix: Path) -> list[tuple[list[int], list[bool]]]:
    """(ids, mask) of every document."""
    data, mask = IndexedDataset(str(prefix)), supervised_of(str(prefix))
    assert mask is not None
    out, at = [], 0
    for i in range(len(data)):
        ids = data[i].tolist()
        out.append((ids, mask.of(at, len(ids)).tolist()))
        at += len(ids)
    assert at == mask.tokens
    return out


def runs(ids: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """The supervised ids, a list for each run of them."""
    both = groupby(zip(ids, mask, strict=True), key=lambda x: x[1])
    return [[i for i, _ in run] for supervised, run in both if supervised]


def unpacked(prefix: Path) -> np.ndarray:
    return np.unpackbits(np.load(f"{prefix}.supervised.npy"), bitorder="little")
