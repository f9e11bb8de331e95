"""All modules of others that are tried."""

from benchmarks.foreign_modules import attention, decoders, diffusion, encoders, vision
from benchmarks.foreign_modules.registry import ForeignModule

MODULES: tuple[ForeignModule, ...] = (
    *vision.MODULES, *attention.MODULES, *diffusion.MODULES, *decoders.MODULES, *encoders.MODULES
)  # fmt: skip
