"""Keeps both stacks from announcing on import which of their optional parts are absent."""

import logging
import warnings


def silence_import_notices() -> None:
    """Call it before the first import of torch or Megatron; nothing here needs those parts."""
    warnings.filterwarnings("ignore", module=r"megatron")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
