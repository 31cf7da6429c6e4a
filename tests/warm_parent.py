"""A process that has imported torch and nothing of ours, and forks a child for each program that it is given.

A new interpreter that imports torch takes seconds, a fork milliseconds. Each line of standard input is a request in
JSON; each line of standard output is the child's exit code.
"""

import json
import os
import signal
import sys
import traceback

import torch

SECONDS = 150
"""A child that takes longer is ended: it waits for something that never comes."""


def run(request: dict) -> None:
    """Be the program: its path, its variables, its output files."""
    signal.alarm(SECONDS)
    for stream, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(request[stream], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.path.insert(0, request["folder"])
    os.environ.update(request["environment"])
    code = 0
    try:
        exec(compile(request["program"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # noqa: T201 - the protocol
