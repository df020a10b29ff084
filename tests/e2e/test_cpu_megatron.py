"""Megatron's own `pretrain` of its own tiny GPT on the CPU: nothing of ours but `megatron_bp.cpu`.

Run as a script, this file is the training program; its arguments are Megatron's.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import entry
import pytest
from ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1
    --global-batch-size 4 --train-iters 3 --lr 1e-2 --lr-decay-style constant --vocab-size 127
    --tokenizer-type NullTokenizer --log-interval 1 --eval-interval 100 --eval-iters 1
    --calculate-per-token-loss --num-workers 0
"""


def logged(output: str) -> list[tuple[int, float]]:
    """(iteration, loss) as Megatron logs them; each start logs a mean at its second step."""
    lines = re.findall(r"iteration +(\d+)/.*?\| lm loss: (\S+)", output)
    return [(int(step), float(loss)) for step, loss in lines]


def train_here(*flags: str) -> list[tuple[int, float]]:
    """One rank, in a process that has imported Megatron already."""
    words = [str(Path(__file__)), *MODEL.split(), *flags]
    return logged(run_ranks(1, entry.command, words, {}, fresh=True)[0])


def train(ranks: int, *flags: str) -> list[tuple[int, float]]:
    """Processes that torchrun starts."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in launcher}
    clean |= {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launch, str(Path(__file__)), *MODEL.split(), *flags],
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stderr.count("megatron_bp: no CUDA device found") == 1  # rank 0 alone says so
    return logged(done.stdout + done.stderr)


@pytest.mark.ranks
@pytest.mark.slow
def test_plain_gpt_trains_saves_and_resumes(tmp_path: Path) -> None:
    """One rank, then two (DP2) that save after two steps, then one that resumes."""
    kind = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    one = train_here()
    assert [step for step, _ in one] == [1, 2, 3]
    assert one[2][1] < one[1][1] < one[0][1]

    saved = ["--save", str(tmp_path), "--save-interval", "2", "--ckpt-format", "torch_dist"]
    two = train(2, *kind, *saved, "--exit-interval", "2")
    assert two == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in one[:2]]
    assert (tmp_path / "iter_0000002" / ".metadata").exists()

    resumed = train_here(*kind, "--load", str(tmp_path))
    assert resumed == [(3, pytest.approx(one[2][1], rel=1e-5))]


def main() -> None:
    from megatron_bp import cpu

    cpu.install()
    from megatron_bp.training.host import prepare_megatron

    prepare_megatron()

    import torch
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    class Counting(torch.utils.data.Dataset):
        """Sample i counts up from i."""

        def __init__(self, size: int, length: int) -> None:
            self.size, self.length = max(size, 1), length

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"tokens": (index + torch.arange(self.length + 1)) % 100}

    def datasets(sizes, vp_stage=None):
        return tuple(Counting(size, get_args().seq_length) for size in sizes)

    datasets.is_distributed = True

    def loss_func(output):
        total, count = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int)
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

    def forward_step(batches, model):
        tokens = next(batches)["tokens"].cuda()
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        length = inputs.shape[1]
        positions = torch.arange(length, device="cuda").expand_as(inputs)
        mask = torch.ones(1, 1, length, length, device="cuda").triu(1).bool()
        return model(inputs, positions, mask, labels=labels), loss_func

    for flag, value in cpu.FLAGS.items():
        sys.argv += [flag] if value is None else [flag, value]
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
