"""A command line and its config file to Megatron's validated arguments.

Config file and command line -> one list of flags -> what is derived -> what is refused -> Megatron.
"""

import contextlib
import logging
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn, TextIO

from megatron_bp import cpu
from megatron_bp.arguments.absent import Absent, DryRun
from megatron_bp.arguments.build import model_config, settings
from megatron_bp.arguments.chats import check_chats
from megatron_bp.arguments.command_line import join
from megatron_bp.arguments.config_file import to_flags
from megatron_bp.arguments.contract import check_contract
from megatron_bp.arguments.data_paths import prefixes_here
from megatron_bp.arguments.degrees import refuse_world
from megatron_bp.arguments.flags import DRY_RUN_FLAGS, add_block_diffusion_flags, full_parser
from megatron_bp.arguments.from_checkpoint import new_run
from megatron_bp.arguments.presets import PRESETS
from megatron_bp.arguments.refused import RefusedError, no
from megatron_bp.arguments.reshape import check_reshape
from megatron_bp.arguments.resolved import check_writable, describe, save_resolved
from megatron_bp.arguments.rules import refuse
from megatron_bp.arguments.schedule import check_schedule
from megatron_bp.arguments.self_conditioning import check_conditioning
from megatron_bp.arguments.versions import check_versions
from megatron_bp.data.checks import check_indexed
from megatron_bp.training.saving import check_load

# Megatron's defaults that do not fit block diffusion, or the local spec without Apex. A run that is
# asked to end saves first; its own hooks of asynchronous saves are into "mcore"; the interval of
# evaluations, which has no default, it divides by.
DEFAULTS: dict[str, str | None] = {
    "--transformer-impl": "local",
    "--micro-batch-size": "1",
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
    "--no-rope-fusion": None,
    "--no-persist-layer-norm": None,
    "--no-masked-softmax-fusion": None,
    "--no-gradient-accumulation-fusion": None,
    "--moe-token-dispatcher-type": "alltoall",
    "--exit-signal-handler": None,
    "--async-strategy": "mcore",
    "--eval-interval": "1000",
    "--dist-ckpt-optim-fully-reshardable": None,
}


def parse(argv: list[str], dry: DryRun | None = None) -> Namespace:
    """As `checked`; exits with one clear line on bad input."""
    try:
        return checked(argv, dry)
    except (AssertionError, ValueError, NotImplementedError) as error:
        fail(refusal(error), error)


def refusal(error: Exception) -> str:
    """What an error of `checked` says, in one line."""
    if isinstance(error, AssertionError):
        return f"Megatron refuses these arguments: {_assertion(error)}"
    return str(error)


def checked(argv: list[str], dry: DryRun | None = None) -> Namespace:
    """Megatron's validated arguments for a command line.

    Also sets Megatron's globals, as its own entry does. Our own values in it: `bdlm_seq_length`
    (the real row length; Megatron's is rounded up), `bdlm_clean_shard_size` (CP in our sense) and
    `bdlm_vocabulary` (the true ids).

    Args:
        argv: the command line.
        dry: for a look at a run, which notes what the machine lacks; nothing is written then.

    Raises:
        AssertionError, ValueError, NotImplementedError: bad input; `refusal` has its words.
    """
    from megatron.training import arguments as megatron
    from megatron.training import get_tokenizer

    check_versions()
    world, absent = int(os.environ.get("WORLD_SIZE", "1")), no if dry is None else dry.note
    flags, real_length, clean_shard_size = resolve(argv, world, absent)
    if dry is not None:
        flags = dry.flags(flags)
    else:
        _refuse_looks({flag.partition("=")[0] for flag in flags})
    before, sys.argv = sys.argv, [sys.argv[0], *flags]
    # Megatron prints a thousand lines, and --print-config is to be a file of its own.
    told: TextIO = sys.stderr if "--print-config" in flags else sys.stdout
    told = told if dry is None else dry.told
    try:
        _log_to(told)
        with contextlib.redirect_stdout(told):
            args: Namespace = megatron.parse_and_validate_args(
                extra_args_provider=add_block_diffusion_flags
            )
    except (AssertionError, ValueError, NotImplementedError):
        raise
    except Exception as error:  # whatever it is, it comes of the arguments and starts nothing
        raise RefusedError(f"Megatron cannot start: {type(error).__name__}: {error}") from error
    finally:
        sys.argv = before
    args.bdlm_seq_length = real_length
    args.bdlm_clean_shard_size = clean_shard_size
    args.bdlm_vocabulary = get_tokenizer().vocab_size
    if dry is not None:
        dry.without(args)
    _check_vocabulary(args)
    model_config(args).finalize()  # for its last checks; the run builds its own
    if dry is None:
        check_writable(args)
    for prefix in prefixes_here(args) if args.rank == 0 else ():
        mask = args.mask_token_id if args.noise == "absorbing" else None
        facts = check_indexed(prefix, args.bdlm_vocabulary, mask)
        print(f"megatron_bp: {prefix}: {facts}", file=told, flush=True)
        if args.chats:
            check_chats(args, prefix)
    _tell_preset(args, told)
    check_load(args)
    check_conditioning(args)
    check_contract(args)
    check_reshape(args)
    check_schedule(args)
    new_run(args)
    resolved = describe(args, argv)
    if args.print_config:
        if args.rank == 0:
            print(resolved)
        raise SystemExit(0)
    if dry is None:
        save_resolved(args, resolved)
    return args


def resolve(
    argv: list[str], world_size: int | None = None, absent: Absent = no
) -> tuple[list[str], int, int]:
    """(flags for Megatron, real row length, CP in our sense) from our own command line.

    Args:
        argv: a config file or none, then flags.
        world_size: ranks that were started, if they are to be checked against the degrees.
        absent: told of what a run needs and this machine lacks.

    Raises:
        ConfigError, RefusedError: bad input, before anything is started.
    """
    flags, args, given = parsed(argv)
    refuse(args, given, absent)
    if world_size is not None:
        refuse_world(args, world_size)
    slot = max(args.block_parallel_size, args.context_parallel_size)
    # Megatron wants a length that its own context parallelism can cut: 2 x slot.
    rounded = -(-args.seq_length // (2 * slot)) * 2 * slot
    positions = args.max_position_embeddings or rounded
    if args.position_embedding_type == "learned_absolute" and positions < args.seq_length:
        raise RefusedError(
            f"--max-position-embeddings {positions}: the table of learned positions must hold the "
            f"--seq-length of {args.seq_length}"
        )
    flags += ["--context-parallel-size", str(slot)]
    flags += ["--seq-length", str(rounded)]
    flags += ["--max-position-embeddings", str(max(positions, rounded))]
    flags += ["--calculate-per-token-loss"]
    flags += ["--eval-micro-batch-size", "1"]  # each row has its number
    flags += ["--eval-iters", str(args.eval_iters * args.eval_draws)]
    if args.num_experts and args.expert_tensor_parallel_size is None:
        flags += ["--expert-tensor-parallel-size", "1"]  # Megatron's default is that of the rest
    if args.on_nonfinite == "skip":
        flags += ["--no-check-for-nan-in-loss-and-grad"]  # it would stop; nonfinite.py guards
    return flags, args.seq_length, args.context_parallel_size


def parsed(argv: list[str]) -> tuple[list[str], Namespace, set[str]]:
    """(all flags, what they parse to, the options that were given) of our own command line.

    Defaults and presets are in it, and the CP degree is in our sense. Nothing is refused yet but
    what is no flag or no value of one.

    Args:
        argv: a config file or none, then flags.

    Raises:
        ConfigError, RefusedError: bad input.
    """
    parser = full_parser()
    flags = join(argv, parser)
    given = {token.split("=", 1)[0] for token in flags if token.startswith("--")}
    for name, value in (DEFAULTS | (cpu.FLAGS if cpu.needed() else {})).items():
        if name not in given:
            flags += [name] if value is None else [name, value]
    try:
        flags += preset_flags(parser.parse_args(flags).objective, given)
        args = parser.parse_args(flags)
    except KeyError as error:  # a signal, say, that is none
        raise RefusedError(f"{error.args[0]!r} is not a value of its flag; see --help") from error
    if "--context-parallel-size" not in given:
        args.context_parallel_size = args.block_parallel_size
    return flags, args, given


def preset_flags(objective: str, given: Collection[str]) -> list[str]:
    """The flags that a preset sets: those of its parts that are not given.

    Args:
        objective: the preset's name.
        given: options that are given, such as "--noise" or "--no-antithetic".
    """
    left = {
        name: value
        for name, value in PRESETS[objective].items()
        if not {f"--{name.replace('_', '-')}", f"--no-{name.replace('_', '-')}"} & set(given)
    }
    return to_flags(left, full_parser(), f"--objective {objective}")


def _refuse_looks(options: Collection[str]) -> None:
    """Refuse, in a run, the flags of a look at one."""
    if {"--dry-run", *DRY_RUN_FLAGS} & set(options):
        no(
            "--dry-run-world-size and --dry-run-json go with --dry-run, and all three on the "
            "command line: a config file is of the run; leave them out, or add --dry-run there"
        )
    if {"--preflight", "--preflight-timeout"} & set(options):
        no(
            "--preflight-timeout goes with --preflight, and both on the command line: a config "
            "file is of the run; leave them out, or add --preflight there"
        )


def _log_to(stream: TextIO) -> None:
    """Megatron's log lines go to a standard output of their own, found when it is imported."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(stream)


def _tell_preset(args: Namespace, stream: TextIO) -> None:
    """Say what of a preset was given otherwise: an included file may do so unseen."""
    other = [
        f"{name} {getattr(args, name)} instead of {value}"
        for name, value in PRESETS[args.objective].items()
        if getattr(args, name) != value
    ]
    if other and args.rank == 0:
        text = f"megatron_bp: --objective {args.objective}, with {', '.join(other)}, as was given"
        print(text, file=stream, flush=True)


def _check_vocabulary(args: Namespace) -> None:
    """Check mask and vocabulary against the tokenizer, once it is there."""
    from megatron.training import get_tokenizer

    if args.padded_vocab_size is not None and args.padded_vocab_size < args.bdlm_vocabulary:
        raise RefusedError(
            f"--padded-vocab-size {args.padded_vocab_size}: the tokenizer has "
            f"{args.bdlm_vocabulary} ids, so text could name rows that the model's table does not "
            f"have; enlarge it"
        )

    tokenizer = get_tokenizer()
    for name in ("pad", "eod", "eos"):
        try:
            special = getattr(tokenizer, name, None)
        except (AttributeError, NotImplementedError):
            continue
        if special is not None and special == args.mask_token_id:
            raise RefusedError(
                f"--mask-token-id {args.mask_token_id} is the tokenizer's {name} id: the model "
                f"could not tell noise from text; choose an id of its own"
            )
    if args.objective != "ar":
        settings(args)  # the objective checks the rest


def fail(message: str, error: Exception) -> NoReturn:
    """One clear line from the first rank of each node, and exit status 2 on all."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"pretrain_bdlm.py: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2) from error


def _assertion(error: AssertionError) -> str:
    """What an assertion says; one without a message is told by its own source line."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error) or (where.line or "").removeprefix("assert ").rstrip("\\, (")
    return f"{' '.join(text.split())} ({Path(where.filename).name}:{where.lineno})"
