"""Nemotron-Labs-Diffusion as NVIDIA publishes it: Ministral 3 under names of its own.

Its class is code in the folder, which is not run: it is read, checked and exported as Ministral 3.
"""

import dataclasses

from megatron_bp.tools.convert.families import ministral3

FAMILY = dataclasses.replace(
    ministral3.FAMILY,
    model_type="nemotron_labs_diffusion",
    read_as="ministral3",
    trunk="encoder.",
    head="diffusion_head.weight",
)
