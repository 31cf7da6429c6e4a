"""Run a command and print how long it took: `python tools/timed.py NAME COMMAND…`."""

from __future__ import annotations

import subprocess
import sys
import time

name, command = sys.argv[1], sys.argv[2:]
print(f"{name} …", flush=True)
begun = time.monotonic()
code = subprocess.run(command, check=False).returncode
print(f"{name}: {'passed' if code == 0 else f'failed with {code}'} in {time.monotonic() - begun:.1f} s", flush=True)
sys.exit(code)
