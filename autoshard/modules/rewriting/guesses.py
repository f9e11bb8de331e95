"""What torch's own modules decide by numbers of their inputs, though either way gives the same result."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import transformer


@contextmanager
def without_guesses() -> Iterator[None]:
    """Let TransformerEncoder and TransformerDecoder apply a mask as it is, and not look whether it is causal."""
    module: Any = transformer
    detect = module._detect_is_causal_mask
    module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        module._detect_is_causal_mask = detect
