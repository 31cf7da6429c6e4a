"""The loader under threads and forks: whatever comes first, the result is the same."""

from __future__ import annotations

import json
from textwrap import dedent
from typing import Any

KERNEL = """
from tileops.backend import Declined, hookimpl, note, register_kernel_type
from tileops.kernels.layer_norm import LayerNorm

class Row(LayerNorm):
    devices = frozenset({"cpu"})

    def forward(self, x, weight, bias):
        return x

def register():
    register_kernel_type("LayerNormFwdOp", "row", Row)
"""
HOOK = """
@hookimpl
def tileops_register_kernels(register_kernel_type):
    register_kernel_type("LayerNormFwdOp", "row", Row)
"""
ASKS = """
import torch
from tileops import LayerNormFwdOp
LayerNormFwdOp((4,)).explain(torch.ones(1, 4))
"""
SOURCES = {
    "acme": KERNEL + "register()\n",
    "asks": ASKS + KERNEL + "register()\n",
    "beta": KERNEL + HOOK,
    "declines": KERNEL + "register()\nraise Declined('no npu here')\n",
    "fails": "import plug_acme\n" + KERNEL + "register()\nraise OSError('no licence')\n",
    "function": KERNEL,
    "imports": "import plug_beta\n" + KERNEL + "register()\nnote('without the compiled kernel')\n",
    "unknown": KERNEL + "register_kernel_type('LayerNromFwdOp', 'row', Row)\nregister()\n",
}

LOADS = 200

STRESS = f"""
import json, os, random, signal, sys, threading, warnings
import pluggy, packaging.requirements, torch
import tileops, tileops.norm
from tileops import LayerNormFwdOp, backend
from tileops.backend import discovery

LOADS = {LOADS}
torch.ones(1, 4)  # what torch does once, it must not be doing when a thread forks
found = list(discovery._distributions())

def ask():
    LayerNormFwdOp((4,)).explain(torch.ones(1, 4))

def bring(name):
    try:
        __import__("plug_" + name)
    except (OSError, backend.Declined):
        pass

def result():
    backend.load()
    bring("fails"), bring("declines")  # what they register now is not taken
    told = [(one.name, one.state.value, one.reason, one.registered, one.notes) for one in backend.status()]
    keys = [verdict.key for verdict in LayerNormFwdOp((4,)).explain(torch.ones(1, 4)).verdicts]
    return json.dumps([told, keys])

def load_somehow(seed, write):
    signal.alarm(60)  # ends one that waits for ever
    warnings.simplefilter("ignore")
    chance = random.Random(seed)
    discovery._distributions = lambda: chance.sample(found, len(found))
    sys.setswitchinterval(chance.choice([1e-6, 1e-5, 5e-3]))
    names = ("acme", "asks", "beta", "fails", "imports", "unknown", "declines", "function")
    forks = seed % 4 == 0
    acts = [backend.load, backend.status, ask]
    if not forks:  # a child could not import what another thread of its parent was importing on its own
        acts += [lambda name=name: bring(name) for name in names]
    count = chance.choice([1, 2, 2, 4, 4, 8, 32])
    barrier = threading.Barrier(count)

    def act(acts):
        barrier.wait(60)
        for one in acts:
            one()

    threads = [threading.Thread(target=act, args=(chance.choices(acts, k=3),)) for _ in range(count)]
    for thread in threads:
        thread.start()
    child = os.fork() if forks else None  # while they load
    if child == 0:
        signal.alarm(60)
        os.write(write, (result() + "\\n").encode())
        os._exit(0)
    for thread in threads:
        thread.join()
    os.write(write, (result() + "\\n").encode())
    if child is not None:
        os.waitpid(child, 0)
    os._exit(0)

read, write = os.pipe()
collected = []
reader = os.fdopen(read)
for seed in range(LOADS):
    child = os.fork()
    if child == 0:
        load_somehow(seed, write)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"load {{seed}} ended with {{code}}"
    collected += [reader.readline() for _ in range(2 if seed % 4 == 0 else 1)]
print(json.dumps([len(collected), sorted(set(collected))]))
"""


def test_many_loads_by_threads_and_in_forks_end_with_one_result(site: Any, forked: Any) -> None:
    for name, source in SOURCES.items():
        site.backend(name, dedent(source), attribute="register" if name == "function" else "")
    site.backend("older", "raise OSError('imported')", metadata="Requires-Python: <3\n")
    count, results = json.loads(forked(site, STRESS).stdout)
    assert count >= LOADS
    assert len(results) == 1, "\n".join(results)
    told, keys = json.loads(results[0])
    states = {name: state for name, state, *_ in told}
    assert states == {
        **dict.fromkeys(("acme", "asks", "beta", "function", "imports", "unknown"), "loaded"),
        "declines": "declined",
        "example": "disabled",
        "fails": "failed",
        "older": "incompatible",
    }
    assert [key for key in keys if ":" in key] == [f"{name}:row" for name, state in states.items() if state == "loaded"]
