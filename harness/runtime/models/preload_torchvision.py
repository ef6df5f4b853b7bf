"""Import torchvision's models when imported: the fork server preloads this module, because the
import would cost each run's process seconds."""

from __future__ import annotations

from harness.runtime.models.torchvision_import import import_torchvision

import_torchvision("models")
