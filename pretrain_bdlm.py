"""Trains a block diffusion language model: YAML or flags -> arguments -> Megatron's pretrain.

    torchrun --nproc-per-node 8 pretrain_bdlm.py configs/RUN.yaml [--any-flag VALUE ...]

On a machine without CUDA it runs on the CPU with gloo, and says so.
"""

import sys
from functools import partial
from typing import Any

from megatron_bp import cpu
from megatron_bp.tools.looks import looked_at


def main(argv: list[str] | None = None) -> None:
    """Parse, build and train; `argv` defaults to the process's own command line."""
    argv = sys.argv[1:] if argv is None else argv
    if looked_at(argv):
        return
    if cpu.needed():
        cpu.install()
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.training import get_tokenizer, pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_bp import arguments
    from megatron_bp.batch.chat_report import chat_report
    from megatron_bp.batch.dataset import build_datasets
    from megatron_bp.tools.report.run import reported
    from megatron_bp.training import ar, saving, start
    from megatron_bp.training.conversion import ConversionError
    from megatron_bp.training.host import prepare_megatron
    from megatron_bp.training.metrics import Metrics
    from megatron_bp.training.record import Recorder
    from megatron_bp.training.step import forward_step

    args = arguments.parse(argv)
    prepare_megatron()
    saving.install(args)
    metrics = Metrics()
    nonfinite = arguments.nonfinite(args)
    nonfinite.install()
    run, check = arguments.new_run(args), None
    step: Any
    if args.objective == "ar":
        step = partial(ar.forward_step, arguments.ar_settings(args, metrics, nonfinite))
        bound = False
    else:
        settings = arguments.settings(args, metrics, nonfinite)
        try:
            arguments.test_kernel(args, settings.attention)
        except RuntimeError as error:
            arguments.fail(str(error), error)
        step, bound = partial(forward_step, settings), settings.objective.is_bound
        check = arguments.conversion(args, run, settings)
    if run is not None:
        start.install(run.ids, check)
    path = arguments.metrics_path(args)
    whole = args.eval_iters * args.eval_global_batch_size if args.eval_iters else None
    Recorder(metrics, path, bound, args.eval_draws, whole, arguments.auxiliary(args)).install(
        partial(parallel_state.get_data_parallel_group, with_context_parallel=True),
        args.context_parallel_size,
    )

    def datasets(sizes: list[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        if args.skip_train:
            sizes = [0, *sizes[1:]]
        # Every evaluation reads the same rows from the first, also after a resume with other flags.
        args.consumed_valid_samples = 0
        config = arguments.dataset_config(args)
        try:
            samples = arguments.evaluation_samples(args)
            built = build_datasets(config, sizes, samples, args.eval_draws, args.micro_batch_size)
        except ValueError as error:
            arguments.fail(str(error), error)
        if args.chats and args.rank == 0 and not vp_stage:
            for line in chat_report(built, args.print_samples, get_tokenizer().detokenize):
                print(line, flush=True)
        if check is not None:
            check.offer(built[0])
        return built

    datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank reads its own
    with saving.errors_told(args), reported(args):
        try:
            pretrain(
                pretrain_cfg_container_from_args(args, arguments.model_config(args)),
                datasets,
                ModelType.encoder_or_decoder,
                step,
            )
        except ConversionError as error:
            arguments.fail(str(error), error)


if __name__ == "__main__":
    main()
