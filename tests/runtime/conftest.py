import sys
from pathlib import Path

# Tests of several packages use modules beside this one, and those of the executor's tests, which
# ranks import by name.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "executor")]
