"""The ids of a folder's tokenizer.json, which may be anybody's."""

from typing import Any

from megatron_bp.tools.convert.folder import Folder
from megatron_bp.tools.convert.refused import ConvertError

FILE = "tokenizer.json"


def tokens(folder: Folder) -> dict[int, str] | None:
    """Id -> text of every token; None where the folder has no tokenizer.json.

    Raises:
        ConvertError: a file that is none of the tokenizers library's.
    """
    if not (folder.path / FILE).exists():
        return None
    content = folder.json(FILE)
    try:
        found = _of_model(content.get("model", {}).get("vocab", {}))
        found |= {token["id"]: token["content"] for token in content.get("added_tokens", [])}
        strange = [one for one in found if type(one) is not int or one < 0]
    except (TypeError, KeyError, AttributeError, IndexError, ValueError) as error:
        raise ConvertError(f"{folder.path / FILE}: is no tokenizer: {error!r}") from error
    if strange:
        raise ConvertError(f"{folder.path / FILE}: has the id {strange[0]!r}")
    return found


def _of_model(vocabulary: Any) -> dict[int, str]:
    if isinstance(vocabulary, list):  # of a unigram model: text and score of each
        return {number: str(one[0]) for number, one in enumerate(vocabulary)}
    return {number: text for text, number in vocabulary.items()}
