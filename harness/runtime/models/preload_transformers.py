"""Import the common part of transformers when imported; see `preload_torchvision`."""

from __future__ import annotations

import contextlib

with contextlib.suppress(Exception):  # which a run reports, if its model needs it
    import transformers.modeling_utils  # noqa: F401
