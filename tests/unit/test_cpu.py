"""`megatron_bp.cpu`, in processes of its own: what it replaces stays replaced."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def python(code: str, **environment: str) -> str:
    """What `code` prints, errors too; its failure is ours."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_refuses_where_cuda_is_present() -> None:
    code = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 3
from megatron_bp import cpu
assert not cpu.needed()
zeros = torch.zeros
try:
    cpu.install()
except RuntimeError as error:
    assert "3 CUDA device(s)" in str(error)
else:
    raise AssertionError("installed over CUDA")
assert torch.zeros is zeros
"""
    python(code)


def test_refuses_several_ranks_without_a_rank() -> None:
    code = """
from megatron_bp import cpu
try:
    cpu.install()
except RuntimeError as error:
    assert "RANK is not set" in str(error)
else:
    raise AssertionError("installed")
"""
    python(code, WORLD_SIZE="2")


def test_install() -> None:
    """All that one installed process can show, in one process: the import of Megatron is slow."""
    code = """
import os, time
import torch
from megatron_bp import cpu

cpu.install()
zeros, to = torch.zeros, torch.Tensor.to
cpu.install()
assert torch.zeros is zeros and torch.Tensor.to is to, "not idempotent"
assert cpu.needed() and not torch.cuda.is_available()
assert os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] == "1"

x = torch.ones(2)
devices = ("cuda", "cuda:0", 0, torch.device("cuda", torch.cuda.current_device()))
for device in devices:
    made = (
        torch.tensor([1], device=device),
        torch.empty(2, device=device),
        torch.arange(2, device=device),
        torch.zeros_like(x, device=device),
        torch.nn.Linear(2, 2, device=device).weight,
        x.new_zeros(2, device=device),
        x.to(device),
        x.to(device=device, dtype=torch.float64),
        x.cuda(device),
        torch.nn.Linear(2, 2).to(device).weight,
        torch.nn.Linear(2, 2).cuda(device).weight,
    )
    assert {tensor.device.type for tensor in made} == {"cpu"}, (device, made)
assert torch.tensor([1], device="cpu", pin_memory=True).cuda(non_blocking=True).device.type == "cpu"
assert torch.zeros(2, device="meta").device.type == "meta"
with torch.device("meta"):
    assert torch.zeros(2).device.type == "meta"
assert x.to(torch.float64).dtype == torch.float64 and x.type(torch.int).dtype == torch.int
assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"

start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record(torch.cuda.current_stream())
time.sleep(0.02)
end.record()
assert 20 <= start.elapsed_time(end) < 2000
with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
    torch.cuda.synchronize()

torch.cuda.manual_seed(1)
state = torch.cuda.get_rng_state()
first = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(3))

before = torch.cuda.memory_allocated()
big = torch.ones(1 << 24)
assert torch.cuda.memory_allocated() - before > big.nbytes // 2
assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() - (1 << 20)
assert torch.compile(lambda y: y + 1)(x).tolist() == [2, 2]
"""
    assert python(code).count("no CUDA device found: running on the CPU with gloo") == 1
