"""Progress of a run on rank 0's terminal."""

import io

from harness.runtime.ranks.world import Progress


class Gone(io.StringIO):
    """A terminal whose session has ended."""

    n_writes = 0

    def isatty(self):
        return True

    def write(self, text):
        self.n_writes += 1
        raise OSError(5, "Input/output error")


def test_a_run_goes_on_where_nobody_reads_its_progress(monkeypatch):
    stream = Gone()
    progress = Progress(is_shown=True, stream=stream)
    for done in (1, 2):
        progress.update("train", done, 2)
    assert stream.n_writes == 1
    monkeypatch.setattr("sys.stderr", None)
    Progress(is_shown=True).update("train", 2, 2)
