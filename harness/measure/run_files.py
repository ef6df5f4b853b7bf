"""Names of the files in a run's directory that more than one program writes."""

HEADER_FILE = "run.json"
# Space for the last header, which replaces the first one where the disk is full.
RESERVE_FILE = ".run.json.reserve"
HEARTBEAT_FILE = "heartbeat"
