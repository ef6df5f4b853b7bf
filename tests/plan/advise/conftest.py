"""Let the tests import the cluster that they share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
