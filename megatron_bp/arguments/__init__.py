"""Command line and YAML to Megatron's arguments and this project's own values.

Stands outside the order of the folders: it imports them, none imports it.
"""

from megatron_bp.arguments.attention import test_kernel
from megatron_bp.arguments.build import (
    ar_settings,
    auxiliary,
    conversion,
    dataset_config,
    evaluation_samples,
    metrics_path,
    model_config,
    nonfinite,
    settings,
    steps_done,
)
from megatron_bp.arguments.config_file import ConfigError
from megatron_bp.arguments.contract import ContractError
from megatron_bp.arguments.from_checkpoint import NewRunError, new_run
from megatron_bp.arguments.parse import fail, parse, resolve
from megatron_bp.arguments.refused import RefusedError
from megatron_bp.arguments.versions import VersionError

__all__ = [
    "ConfigError",
    "ContractError",
    "NewRunError",
    "RefusedError",
    "VersionError",
    "ar_settings",
    "auxiliary",
    "conversion",
    "dataset_config",
    "evaluation_samples",
    "fail",
    "metrics_path",
    "model_config",
    "new_run",
    "nonfinite",
    "parse",
    "resolve",
    "settings",
    "steps_done",
    "test_kernel",
]
