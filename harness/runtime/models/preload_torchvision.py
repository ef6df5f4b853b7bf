"""Imports torchvision's models when it is imported itself: for the fork server, whose children then
have them. Each would take seconds for that otherwise, and a sweep starts one for every run."""

from __future__ import annotations

from harness.runtime.models.torchvision_import import import_torchvision

import_torchvision("models")
