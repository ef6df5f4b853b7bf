import sys
from pathlib import Path

# Spawned ranks import functions of these tests by name, and inherit this path.
sys.path.insert(0, str(Path(__file__).parent))
