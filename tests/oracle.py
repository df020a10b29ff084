"""The dense float64 oracle, written from the definitions; it imports nothing of megatron_bp.

Plain functions and Python loops over positions: slow, short, and meant to be checked by eye. Every
parallel path is compared with these. Good for a few hundred rows.

Shapes: T packed clean positions, X corrupted rows, S rows = T + X (clean first), H query heads,
G key/value heads, d head size, V vocabulary with Megatron's padding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# --- who sees whom -------------------------------------------------------------------------------


def positions(document: Sequence[int]) -> list[int]:
    """Position in its own document, of each packed position [T]; 0 for padding (-1)."""
    seen: dict[int, int] = {}
    out = []
    for ordinal in _ints(document):
        if ordinal < 0:
            out.append(0)
            continue
        out.append(seen.get(ordinal, 0))
        seen[ordinal] = out[-1] + 1
    return out


def block_of(
    document: Sequence[int],
    block_size: int,
    supervised: Sequence[bool] | None = None,
    grid: str = "document",
) -> list[int]:
    """Global block number of each packed position [T]; -1 for padding.

    Blocks count from each document's own start and the last one may be short: with documents
    0 0 0 1 1 1 and blocks of 2 the answer is 0 0 1 2 2 3. A block never holds a response (a run of
    supervised tokens) and what follows it. On the grid "response" blocks count from where the
    response, or what follows it, starts.
    """
    assert grid in ("document", "response"), grid
    document, out, last = _ints(document), [], -1
    said = [True] * len(document) if supervised is None else [bool(s) for s in supervised]
    count = 0  # tokens since blocks were last counted from
    for i, ordinal in enumerate(document):
        if ordinal < 0:
            out.append(-1)
            continue
        fresh = i == 0 or document[i - 1] != ordinal
        response_ends = not fresh and said[i - 1] and not said[i]
        response_starts = not fresh and said[i] and not said[i - 1]
        if fresh or (grid == "response" and (response_ends or response_starts)):
            count = 0
        last += count % block_size == 0 or response_ends
        count += 1
        out.append(last)
    return out


def corrupted_rows(
    document: Sequence[int], block_size: int, supervised: Sequence[bool] | None = None
) -> list[int]:
    """Clean positions that have a corrupted row: those of blocks with a supervised token."""
    block = block_of(document, block_size)
    if supervised is None:
        return [i for i, b in enumerate(block) if b >= 0]
    wanted = {b for b, s in zip(block, supervised, strict=True) if b >= 0 and s}
    return [i for i, b in enumerate(block) if b in wanted]


def visible(
    document: Sequence[int],
    block_size: int,
    *,
    clean_relation: str = "block",
    own_relation: str = "bidirectional",
    window: int | None = None,
    window_anchor: str = "row",
    corrupted: Sequence[int] | None = None,
    copy: Sequence[int] | None = None,
    block: Sequence[int] | None = None,
) -> Tensor:
    """True where a row sees a key, bool [T+X, T+X]: clean positions first, then corrupted rows.

    One document of four tokens, blocks of 2 (rows and keys 0 1 2 3, then corrupted 0' 1' 2' 3'):

             0 1 2 3  0' 1' 2' 3'
        0    x x .  .  .  .  .  .
        1    x x .  .  .  .  .  .
        2    x x x  x  .  .  .  .
        3    x x x  x  .  .  .  .
        0'   . . .  .  x  x  .  .
        1'   . . .  .  x  x  .  .
        2'   x x .  .  .  .  x  x
        3'   x x .  .  .  .  x  x

    Args:
        document: ordinal of each packed position [T], -1 for padding (sees and is seen by nothing).
        block_size: tokens in a block.
        clean_relation: a clean row sees its own and earlier blocks ("block"), or itself and earlier
            tokens ("token").
        own_relation: a corrupted row sees all of its unit ("bidirectional") or up to itself
            ("causal").
        window: a row at position p sees clean positions >= p - (window - 1). Never cuts the unit.
        window_anchor: "row", or "block": corrupted rows count the window from their block's start.
        corrupted: clean position of each corrupted row [X]; default all but padding, in order.
        copy: copy of each corrupted row [X]; a unit is a block in one copy. Default all 0.
        block: block of each packed position [T]; default `block_of` the document grid.
    """
    assert clean_relation in ("block", "token"), clean_relation
    assert own_relation in ("bidirectional", "causal"), own_relation
    assert window_anchor in ("row", "block"), window_anchor
    document = _ints(document)
    block = block_of(document, block_size) if block is None else _ints(block)
    corrupted = corrupted_rows(document, block_size) if corrupted is None else _ints(corrupted)
    copy = [0] * len(corrupted) if copy is None else _ints(copy)
    _check_whole_blocks(block, corrupted, copy)
    length, rows = len(document), len(document) + len(corrupted)
    mask = [[False] * rows for _ in range(rows)]

    for q in range(length):  # clean rows
        for k in range(length):
            if block[q] < 0 or document[q] != document[k]:
                continue
            sees = block[k] <= block[q] if clean_relation == "block" else k <= q
            if window is not None:
                sees = sees and k >= q - (window - 1)
            mask[q][k] = sees
    for x, q in enumerate(corrupted):
        origin = block.index(block[q]) if window_anchor == "block" else q
        for k in range(length):  # clean keys: strictly earlier blocks
            sees = document[q] == document[k] and block[k] < block[q]
            if window is not None:
                sees = sees and k >= origin - (window - 1)
            mask[length + x][k] = sees
        for y, k in enumerate(corrupted):  # corrupted keys: the own unit
            same_unit = block[k] == block[q] and copy[x] == copy[y]
            mask[length + x][length + y] = same_unit and (own_relation == "bidirectional" or k <= q)
    return torch.tensor(mask, dtype=torch.bool).reshape(rows, rows)


def _check_whole_blocks(block: list[int], corrupted: list[int], copy: list[int]) -> None:
    """Each unit holds every position of its block once."""
    for b, c in {(block[i], c) for i, c in zip(corrupted, copy, strict=True)}:
        assert b >= 0, "padding has no corrupted row"
        want = [i for i, other in enumerate(block) if other == b]
        got = [i for i, d in zip(corrupted, copy, strict=True) if block[i] == b and d == c]
        assert got == want, f"block {b} copy {c} has corrupted rows {got}, not {want}"


def _ints(values: Sequence[int] | Tensor) -> list[int]:
    return [int(v) for v in values]


# --- the network ---------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Dense softmax attention, float64 [S, H, d], of q [S,H,d], k and v [K,G,d], mask [S,K].

    A row that sees no key gives 0 and no gradient.
    """
    q, k, v = q.double(), k.double(), v.double()
    weights = torch.softmax(_scores(q, k, mask, scale), dim=-1)  # [H, S, K]
    weights = weights * mask.any(dim=-1)[None, :, None]
    return torch.einsum("hsk,khd->shd", weights, _repeat(v, q.shape[1]))


def log_sum_exp(q: Tensor, k: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Log of the sum of exp(scores) over the visible keys, float64 [S, H]; -inf without a key."""
    scores = _scores(q.double(), k.double(), mask, scale)
    lse = torch.logsumexp(scores, dim=-1).T  # [S, H]
    return lse.masked_fill(~mask.any(dim=-1)[:, None], -math.inf)


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Scaled scores [H, S, K], -inf where hidden; finite in rows without a visible key."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = scale * torch.einsum("shd,khd->hsk", q, _repeat(k, q.shape[1]))
    hidden = ~mask & mask.any(dim=-1, keepdim=True)
    return scores.masked_fill(hidden, -math.inf)


def _repeat(x: Tensor, heads: int) -> Tensor:
    """[K, G, d] to [K, H, d]: query head h reads key/value head h // (H / G)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def cross_entropy(
    logits: Tensor, labels: Tensor, vocab: int, excluded: Sequence[int] = ()
) -> Tensor:
    """-log p(label), float64 [S], of logits [S, V]; ids >= vocab and excluded ids have p = 0."""
    logits = logits.double()
    hidden = torch.arange(logits.shape[-1]) >= vocab
    for token in excluded:
        hidden[token] = True
    log_p = torch.log_softmax(logits.masked_fill(hidden, -math.inf), dim=-1)
    return -log_p.gather(-1, labels.long()[:, None])[:, 0]


def rotary(
    x: Tensor,
    position: Tensor,
    base: float = 10000.0,
    percent: float = 1.0,
    interleaved: bool = False,
    yarn: tuple[float, int, float, float] | None = None,
) -> Tensor:
    """Float64 x [S, H, d], turned by the positions [S]; its first int(d * percent) features only.

    Feature pairs are (i, i + r/2) (GPT-NeoX, Megatron's default) or (2i, 2i + 1) (interleaved).
    YaRN (arXiv 2309.00071): (stretch, original length, turns above which none, below which all of
    it); what is turned is also multiplied by 0.1 ln(stretch) + 1.
    """
    x = x.double()
    turned = x.shape[-1] if percent >= 1.0 else int(x.shape[-1] * percent)
    out = x.clone()
    for pair in range(turned // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + turned // 2)
        frequency, factor = base ** (-2 * pair / turned), 1.0
        if yarn is not None:
            stretch, length, fast, slow = yarn
            first, last = (
                turned * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))
                for turns in (fast, slow)
            )
            low, high = max(math.floor(first), 0), min(math.ceil(last), turned - 1)
            part = min(1.0, max(0.0, (pair - low) / (high - low)))
            frequency = (1 - part) * frequency + part * frequency / stretch
            factor = 0.1 * math.log(stretch) + 1
        angle = position.double()[:, None] * frequency  # [S, 1]
        out[..., i] = factor * (x[..., i] * angle.cos() - x[..., j] * angle.sin())
        out[..., j] = factor * (x[..., j] * angle.cos() + x[..., i] * angle.sin())
    return out


@dataclass(frozen=True)
class GPTShape:
    """What `gpt` has to know beside the weights. Biases are there if they are in the weights."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    norm: str = "RMSNorm"  # or "LayerNorm"
    eps: float = 1e-5
    swiglu: bool = True
    gelu: str = "none"  # exact erf; "tanh" is what Megatron's bias_gelu fusion computes
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    yarn: tuple[float, int, float, float] | None = None
    query_scale: tuple[float, int] | None = None  # beta, length: 1 + beta ln(1 + floor(p / length))
    tied: bool = False
    qk_layernorm: bool = False
    topk: int = 2  # of the experts of an MoE layer: one whose weights hold a router
    score: str = "softmax"  # of the chosen experts; or "sigmoid", divided by their sum
    pre_softmax: bool = False  # the softmax is over all experts, and the chosen keep their parts


def gpt(
    weights: dict[str, Tensor],
    config: GPTShape,
    ids: Tensor,
    position: Tensor,
    mask: Tensor | Sequence[Tensor],
    routers: list[Tensor] | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """Logits, float64 [S, V], of ids [S]; names of `weights` as in Megatron's local spec.

    Expert e of an MoE layer is `mlp.experts.local_experts.e`, whatever rank holds it.

    Args:
        weights: state dict of a GPTModel, any dtype; gradients reach it.
        config: the shape of the network.
        ids: token ids [S].
        position: position ids [S].
        mask: bool [S, S], True = sees; or one per layer.
        routers: gets the router logits [S, E] of each MoE layer.
        added: [S, hidden], added to the embeddings.
    """
    masks = [mask] * config.layers if isinstance(mask, Tensor) else list(mask)
    x = weights["embedding.word_embeddings.weight"].double()[ids]
    if added is not None:
        x = x + added
    for n, layer_mask in zip(range(config.layers), masks, strict=True):
        layer = f"decoder.layers.{n}."
        y = _norm(weights, layer + "input_layernorm", config, x)
        x = x + _self_attention(weights, layer + "self_attention.", config, y, position, layer_mask)
        y = _norm(weights, layer + "pre_mlp_layernorm", config, x)
        if layer + "mlp.router.weight" in weights:
            x = x + _experts(weights, layer + "mlp.", config, y, routers)
        else:
            x = x + _mlp(weights, layer + "mlp.", config, y)
    x = _norm(weights, "decoder.final_layernorm", config, x)
    output = "embedding.word_embeddings.weight" if config.tied else "output_layer.weight"
    return x @ weights[output].double().T


def _self_attention(
    weights: dict[str, Tensor],
    name: str,
    config: GPTShape,
    x: Tensor,
    position: Tensor,
    mask: Tensor,
) -> Tensor:
    """[S, hidden] to [S, hidden]. linear_qkv holds, group after group: its q heads, k, v."""
    rows, per_group = x.shape[0], config.heads // config.groups
    qkv = _linear(weights, name + "linear_qkv", x)
    qkv = qkv.view(rows, config.groups, per_group + 2, config.head_dim)
    q = qkv[:, :, :per_group].reshape(rows, config.heads, config.head_dim)
    k, v = qkv[:, :, per_group], qkv[:, :, per_group + 1]
    if config.qk_layernorm:
        q = _norm(weights, name + "q_layernorm", config, q)
        k = _norm(weights, name + "k_layernorm", config, k)
    turn = (config.rotary_base, config.rotary_percent, config.rotary_interleaved, config.yarn)
    q, k = rotary(q, position, *turn), rotary(k, position, *turn)
    if config.query_scale is not None:
        beta, length = config.query_scale
        q = q * (1 + beta * torch.log1p(position.double() // length))[:, None, None]
    out = attention(q, k, v, mask)
    return _linear(weights, name + "linear_proj", out.reshape(rows, -1))


def _mlp(weights: dict[str, Tensor], name: str, config: GPTShape, x: Tensor) -> Tensor:
    """[S, hidden] to [S, hidden]. With swiglu the first half of linear_fc1 is the gate."""
    y = _linear(weights, name + "linear_fc1", x)
    if config.swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * up
    elif config.gelu == "tanh":
        y = y / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    else:
        y = y / 2 * (1 + torch.erf(y / math.sqrt(2)))
    return _linear(weights, name + "linear_fc2", y)


def _experts(
    weights: dict[str, Tensor],
    name: str,
    config: GPTShape,
    x: Tensor,
    routers: list[Tensor] | None,
) -> Tensor:
    """[S, hidden] to [S, hidden]: each row's top-k experts, weighted; then the shared one, if any.

    The weights are a softmax over the logits of the chosen (before choosing with `pre_softmax`), or
    their sigmoids over their sum.
    """
    logits = x @ weights[name + "router.weight"].double().T
    if routers is not None:
        routers.append(logits)
    rows = []
    for row, of_row in zip(x, logits, strict=True):
        scores = of_row if config.score == "softmax" else torch.sigmoid(of_row)
        chosen = scores.argsort(descending=True)[: config.topk]
        if config.pre_softmax:
            share = torch.softmax(scores, dim=0)[chosen]
        elif config.score == "softmax":
            share = torch.softmax(scores[chosen], dim=0)
        else:
            share = scores[chosen] / scores[chosen].sum()
        parts = [
            share[i] * _mlp(weights, f"{name}experts.local_experts.{int(e)}.", config, row)
            for i, e in enumerate(chosen)
        ]
        rows.append(torch.stack(parts).sum(dim=0))
    y = torch.stack(rows) if rows else torch.zeros_like(x)
    if name + "shared_experts.linear_fc1.weight" in weights:
        y = y + _mlp(weights, name + "shared_experts.", config, x)
    return y


def self_condition(
    weights: dict[str, Tensor], config: GPTShape, logits: Tensor, hidden: Tensor
) -> Tensor:
    """What self-conditioning adds to the embedding of a row, float64 [S, hidden].

    The expected input embedding under the softmax of the logits [S, V], then RMSNorm and a gated
    MLP. The logits are those of a first pass; no gradient reaches them or the expectation.

    Args:
        weights: state dict of the model.
        config: the shape of the network.
        logits: [S, V].
        hidden: bool [V], ids that cannot be predicted.
    """
    table = weights["embedding.word_embeddings.weight"].double().detach()
    soft = torch.softmax(logits.detach().masked_fill(hidden, -math.inf), dim=-1) @ table
    y = soft / torch.sqrt((soft * soft).mean(dim=-1, keepdim=True) + config.eps)
    y = y * weights["self_conditioning.norm.weight"].double()
    gate = _linear(weights, "self_conditioning.gate", y)
    y = gate * torch.sigmoid(gate) * _linear(weights, "self_conditioning.up", y)
    return _linear(weights, "self_conditioning.down", y)


def switch_loss(logits: Tensor, topk: int, score: str = "softmax") -> Tensor:
    """Load balancing loss of one layer, float64 scalar, of router logits [S, E] of counted rows.

    E x sum over experts of f_e P_e (Switch Transformer, arXiv 2101.03961): f_e the share of all
    S x topk choices that fall on e, P_e the mean probability of e. 0 without rows.
    """
    rows, experts = logits.shape
    if rows == 0:
        return logits.sum() * 0
    probability = torch.softmax(logits, dim=-1)
    if score == "sigmoid":
        probability = torch.sigmoid(logits)
        probability = probability / probability.sum(dim=-1, keepdim=True)
    chosen = probability.argsort(dim=-1, descending=True)[:, :topk]
    loss = torch.zeros((), dtype=torch.float64)
    for e in range(experts):
        f = (chosen == e).sum().item() / (rows * topk)
        loss = loss + f * probability[:, e].mean()
    return experts * loss


def z_loss(logits: Tensor) -> Tensor:
    """Sum over rows of the squared log-sum-exp of router logits [S, E] (arXiv 2202.08906)."""
    return torch.logsumexp(logits, dim=-1).square().sum()


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ weights[name + ".weight"].double().T
    bias = weights.get(name + ".bias")
    return y if bias is None else y + bias.double()


def _norm(weights: dict[str, Tensor], name: str, config: GPTShape, x: Tensor) -> Tensor:
    """RMSNorm or LayerNorm over the last dimension."""
    if config.norm == "LayerNorm":
        x = x - x.mean(dim=-1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + config.eps)
    y = y * weights[name + ".weight"].double()
    bias = weights.get(name + ".bias")
    return y if bias is None else y + bias.double()


# --- the loss ------------------------------------------------------------------------------------


class Bound(NamedTuple):
    """Loss sum (differentiable), its count, and what was done to each packed position [T]."""

    total: Tensor  # float64 scalar: sum of weight * CE
    count: int  # supervised tokens, corrupted or not
    table: dict[str, Tensor]  # [T] each: corrupted (-1: no row), masked, p, weight, ce (0: no row)
    routers: list[Tensor]  # router logits of each MoE layer, of the rows that are `routed`


def noise(t: float, schedule: str = "linear") -> tuple[float, float]:
    """Probability p(t) that a token is corrupted, and its derivative p'(t)."""
    if schedule == "linear":
        return t, 1.0
    assert schedule == "cosine", schedule
    return 1 - math.cos(math.pi * t / 2), math.pi / 2 * math.sin(math.pi * t / 2)


def bound(
    weights: dict[str, Tensor],
    config: GPTShape,
    tokens: Sequence[int] | Tensor,
    document: Sequence[int] | Tensor,
    block_size: int,
    t: Sequence[float] | Tensor,
    u: Sequence[float] | Tensor,
    *,
    mask_id: int,
    vocab: int,
    weighting: str = "bound",
    schedule: str = "linear",
    supervised: Sequence[bool] | Tensor | None = None,
    clean_relation: str = "block",
    own_relation: str = "bidirectional",
    window: int | list[int | None] | None = None,
    exclude_mask_logit: bool = False,
    replacement: Sequence[int] | Tensor | None = None,
    routed: str = "all",
) -> Bound:
    """The BDLM loss with "same" alignment, from its definition.

    Args:
        weights: state dict of a GPTModel (see `gpt`).
        config: the shape of the network.
        tokens: clean ids [T].
        document: ordinal of each position [T], -1 for padding.
        block_size: tokens in a block.
        t: noise level of each global block [N] (see `block_of`).
        u: one uniform draw a position [T]; a token of block b is masked if u < p(t[b]).
        mask_id: what a masked token becomes.
        vocab: true vocabulary size.
        weighting: of a masked token: "bound" p'(t)/p(t), "one" 1, "inverse_p" 1/p(t).
        schedule: "linear" p = t, or "cosine" p = 1 - cos(pi t / 2).
        supervised: bool [T]; only these are corrupted and scored, and only their blocks have
            corrupted rows. Default: all but padding.
        clean_relation: see `visible`.
        own_relation: see `visible`.
        window: see `visible`; of all layers, or a list with one for each.
        exclude_mask_logit: the mask token cannot be predicted.
        replacement: id each position [T] becomes if corrupted (uniform noise); default the mask.
        routed: clean rows in `Bound.routers`: "all", those "seen" by a unit (of its document, in an
            earlier block), or "scored" as well (the blocks of units too).
    """
    assert weighting in ("bound", "one", "inverse_p"), weighting
    tokens, document = _ints(tokens), _ints(document)
    length, block = len(tokens), block_of(document, block_size)
    scored = [True] * length if supervised is None else [bool(s) for s in supervised]
    scored = [s and b >= 0 for s, b in zip(scored, block, strict=True)]

    table = {
        "corrupted": torch.full([length], -1),
        "masked": torch.zeros(length, dtype=torch.bool),
        "p": torch.zeros(length, dtype=torch.float64),
        "weight": torch.zeros(length, dtype=torch.float64),
        "ce": torch.zeros(length, dtype=torch.float64),
    }
    rows = corrupted_rows(document, block_size, scored)
    for i in rows:
        p, slope = noise(float(t[block[i]]), schedule)
        masked = scored[i] and float(u[i]) < p
        noise_id = mask_id if replacement is None else int(replacement[i])
        table["corrupted"][i] = noise_id if masked else tokens[i]
        table["masked"][i] = masked
        table["p"][i] = p
        if masked:
            table["weight"][i] = {"bound": slope / p, "one": 1.0, "inverse_p": 1 / p}[weighting]

    at = torch.tensor(rows, dtype=torch.long)
    clean = torch.tensor(tokens, dtype=torch.long)
    position = torch.tensor(positions(document), dtype=torch.long)
    windows = window if isinstance(window, list) else [window] * config.layers
    mask = [
        visible(
            document,
            block_size,
            clean_relation=clean_relation,
            own_relation=own_relation,
            window=of_layer,
            corrupted=rows,
        )
        for of_layer in windows
    ]
    ids = torch.cat([clean, table["corrupted"][at]])
    routers: list[Tensor] = []
    where = torch.cat([position, position[at]])
    logits = gpt(weights, config, ids, where, mask, routers)[length:]
    last = {document[i]: block[i] for i in rows}  # the last block of each document with a unit
    counted = [
        b >= 0
        and (routed == "all" or b < last.get(d, -1) or (routed == "scored" and b == last.get(d)))
        for b, d in zip(block, document, strict=True)
    ]
    real = torch.tensor(counted + [True] * len(rows), dtype=torch.bool)
    excluded = [mask_id] if exclude_mask_logit else []
    masked_rows = table["masked"][at]
    scored_at = at[masked_rows]
    ce = cross_entropy(logits[masked_rows], clean[scored_at], vocab, excluded)
    table["ce"][scored_at] = ce.detach()
    total = (table["weight"][scored_at] * ce).sum()
    return Bound(total, sum(scored), table, [of_layer[real] for of_layer in routers])


class Draws(NamedTuple):
    """Chance of one copy: t of each global block [N]; u, and what a token becomes, [T]."""

    t: Sequence[float]
    u: Sequence[float]
    other: Sequence[int]


class Row(NamedTuple):
    """A corrupted row: what it holds and what it is scored on."""

    copy: int
    position: int  # packed
    token: int
    label: int  # of the token that it can be scored on; -1: none
    weight: float  # 0: not scored
    counted: bool
    p: float  # of the token that it can be scored on


def corrupted_table(
    tokens: Sequence[int],
    document: Sequence[int],
    block: Sequence[int],
    supervised: Sequence[bool],
    copies: Sequence[Draws],
    *,
    weighting: str = "bound",
    schedule: str = "linear",
    complementary: bool = False,
    never: Sequence[int] = (),
    alignment: str = "same",
    scored: str = "corrupted",
    count: str = "supervised",
) -> list[Row]:
    """Every corrupted row of a recipe, unit by unit, from the definitions.

    Args:
        tokens: clean ids [T].
        document: ordinal of each position [T], -1 for padding.
        block: `block_of` each position [T].
        supervised: [T].
        copies: chance of each copy. Of a complementary pair only that of the first counts.
        weighting: see `bound`.
        schedule: see `bound`.
        complementary: odd copies corrupt what the copy before them left.
        never: ids that are neither corrupted nor scored.
        alignment: the row of token i predicts token i ("same") or i + 1 ("next").
        scored: "corrupted" tokens or "all" that could be.
        count: "supervised" tokens that can be scored, or "corrupted" ones. A complementary pair
            counts a supervised token once.
    """
    length = len(tokens)
    may = [bool(supervised[i]) and block[i] >= 0 and tokens[i] not in never for i in range(length)]

    def predicts(i: int) -> int | None:
        """The position that the row of position i is about."""
        if alignment == "same":
            return i
        inside = i + 1 < length and document[i + 1] == document[i]
        return i + 1 if inside else None

    def p_of(copy: int, i: int) -> tuple[float, float]:
        if complementary and copy % 2 == 1:
            return 1 - p_of(copy - 1, i)[0], math.nan
        return noise(float(copies[copy].t[block[i]]), schedule)

    def hit(copy: int, i: int) -> bool:
        if complementary and copy % 2 == 1:
            return may[i] and not hit(copy - 1, i)
        return may[i] and float(copies[copy].u[i]) < p_of(copy, i)[0]

    rows = []
    for b in range(max(block, default=-1) + 1):
        inside = [i for i in range(length) if block[i] == b]
        about = [j for j in map(predicts, inside) if j is not None]
        if not any(supervised[j] for j in about):
            continue
        for c in range(len(copies)):
            for i in inside:
                becomes = copies[c - c % 2 if complementary else c].other[i]
                token = int(becomes) if hit(c, i) else int(tokens[i])
                j = predicts(i)
                if j is None or not may[j]:
                    rows.append(Row(c, i, token, -1, 0.0, False, 0.0))
                    continue
                p, slope = p_of(c, j)
                weight = 0.0
                if scored == "all" or hit(c, j):
                    weight = {
                        "bound": lambda p=p, s=slope: s / p,
                        "one": lambda: 1.0,
                        "inverse_p": lambda p=p: 1 / p,
                    }[weighting]()
                counted = hit(c, j) if count == "corrupted" else not complementary or c % 2 == 0
                rows.append(Row(c, i, token, int(tokens[j]), weight, counted, p))
    return rows


def diffusion(
    weights: dict[str, Tensor],
    config: GPTShape,
    tokens: Sequence[int] | Tensor,
    document: Sequence[int] | Tensor,
    block: Sequence[int],
    table: Sequence[Row],
    *,
    vocab: int,
    excluded: Sequence[int] = (),
    clean_relation: str = "block",
    own_relation: str = "bidirectional",
    window: int | list[int | None] | None = None,
    window_anchor: str = "row",
    conditioned: Sequence[bool] | None = None,
    alignment: str = "same",
    routed: str = "all",
) -> tuple[Tensor, int, list[Tensor]]:
    """(sum of weight x CE, count, router logits) of a table of corrupted rows.

    Args:
        weights: state dict of a GPTModel (see `gpt`).
        config: the shape of the network.
        tokens: clean ids [T].
        document: ordinal of each position [T], -1 for padding.
        block: `block_of` each position [T].
        table: of `corrupted_table`.
        vocab: true vocabulary size.
        excluded: ids that cannot be predicted.
        clean_relation, own_relation, window, window_anchor: see `visible`.
        conditioned: of each document, whether its corrupted rows are conditioned on a first pass:
            on the row that predicts their token, if it is of their own unit. Default none.
        alignment: which row that is; see `corrupted_table`.
        routed: see `bound`; or "whole": the clean rows of documents with a corrupted row.
    """
    tokens, document = _ints(tokens), _ints(document)
    length = len(tokens)
    at = [row.position for row in table]
    windows = window if isinstance(window, list) else [window] * config.layers
    mask = [
        visible(
            document,
            1,
            clean_relation=clean_relation,
            own_relation=own_relation,
            window=of_layer,
            window_anchor=window_anchor,
            corrupted=at,
            copy=[row.copy for row in table],
            block=block,
        )
        for of_layer in windows
    ]
    position = positions(document)
    ids = torch.tensor([*tokens, *(row.token for row in table)], dtype=torch.long)
    where = torch.tensor(position + [position[i] for i in at], dtype=torch.long)
    routers: list[Tensor] = []
    added = None
    if conditioned is not None:
        with torch.no_grad():
            first = gpt(weights, config, ids, where, mask)[length:]
        hidden = torch.arange(first.shape[-1]) >= vocab
        hidden[list(excluded)] = True
        of_row = self_condition(weights, config, first, hidden)
        place = {(row.copy, row.position): k for k, row in enumerate(table)}
        added = torch.zeros(len(ids), config.hidden, dtype=torch.float64)
        for k, row in enumerate(table):
            source = row.position - (alignment == "next")
            inside = source >= 0 and block[source] == block[row.position]
            if conditioned[document[row.position]] and inside:
                added[length + k] = of_row[place[row.copy, source]]
    logits = gpt(weights, config, ids, where, mask, routers, added)[length:]
    last = {document[i]: block[i] for i in at}
    needed = [
        b >= 0
        and (
            routed == "all"
            or (routed == "whole" and d in last)
            or b < last.get(d, -1)
            or (routed == "scored" and b == last.get(d))
        )
        for b, d in zip(block, document, strict=True)
    ]
    real = torch.tensor(needed + [True] * len(table), dtype=torch.bool)
    keep = torch.tensor([row.weight != 0 for row in table], dtype=torch.bool)
    label = torch.tensor([row.label for row in table], dtype=torch.long)
    weight = torch.tensor([row.weight for row in table], dtype=torch.float64)
    ce = cross_entropy(logits[keep], label[keep], vocab, list(excluded))
    count = sum(row.counted for row in table)
    return (weight[keep] * ce).sum(), count, [of_layer[real] for of_layer in routers]


def next_token(
    weights: dict[str, Tensor],
    config: GPTShape,
    tokens: Sequence[int] | Tensor,
    document: Sequence[int] | Tensor,
    *,
    vocab: int,
    supervised: Sequence[bool] | Tensor | None = None,
) -> tuple[Tensor, int]:
    """(sum of cross-entropies, count) of a plain causal model over each document by itself.

    Row i predicts token i + 1 of its document, where that token is supervised.
    """
    tokens, document = _ints(tokens), _ints(document)
    scored = [True] * len(tokens) if supervised is None else [bool(s) for s in supervised]
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ordinal in sorted({d for d in document if d >= 0}):
        at = [i for i, d in enumerate(document) if d == ordinal]
        ids = torch.tensor([tokens[i] for i in at], dtype=torch.long)
        causal = torch.ones(len(at), len(at), dtype=torch.bool).tril()
        logits = gpt(weights, config, ids, torch.arange(len(at)), causal)
        keep = torch.tensor([scored[i] for i in at[1:]], dtype=torch.bool)
        ce = cross_entropy(logits[:-1][keep], ids[1:][keep], vocab)
        total, count = total + ce.sum(), count + int(keep.sum())
    return total, count
