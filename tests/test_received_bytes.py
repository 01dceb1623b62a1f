"""Nothing that a peer has sent is unpickled or run: all places that read such bytes are listed.

Texts of the store are JSON, numbers or words; messages are tensors whose dtype and size are known
before. A new place fails here: list it if it makes no more than that of what it reads.
"""

import ast
from collections.abc import Iterator

from test_architecture import SOURCE, TREES

# What makes objects or code of bytes, or communicates by it, under any module.
UNPICKLES = {
    *("dill", "cloudpickle", "joblib", "marshal", "pickle", "shelve", "yaml", "Unpickler"),
    *("eval", "exec", "__import__", "import_module", "load_module"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list"),
    *("scatter_object_list", "send_object_list"),
}
# What reads bytes or parses them.
READS = {
    *("compare_set", "find", "frombuffer", "gather_bytes", "hear", "literal_eval", "loads"),
    *("multi_get", "recv", "recv_bytes", "recvfrom", "recv_into", "unpack"),
}
UNPICKLING = {
    "__init__.py": "import_module: offbeat.names",
    "hogwild/launch.py": "pickle: results of its own children, by pipes of one machine",
    "hogwild/worker.py": "pickle: the other end",
    "hogwild/logistic/classifier.py": "joblib: a module that is imported, and reads nothing",
}
PEERS = {
    "attach/node_start.py": "JSON of the store: who has been started",
    "attach/start.py": "JSON of the store: what the ranks compare",
    "data/arguments.py": "JSON: the arguments of a sampler",
    "data/sampler.py": "JSON: speeds of the ranks",
    "doctor/links.py": "JSON of the store: addresses and measurements",
    "doctor/probe.py": "sockets: bytes of which the number is counted",
    "elastic/admission.py": "the store: numbers of steps",
    "elastic/generation.py": "JSON: who is there",
    "elastic/handover.py": "JSON of dtypes and shapes, then tensors of these",
    "elastic/join.py": "JSON of the store: what the model of a run is",
    "elastic/join_barrier.py": "the store: one of two words",
    "elastic/newcomer.py": "JSON of the store: heartbeats of one that asks to join",
    "elastic/node.py": "JSON: faults and requests",
    "elastic/portable.py": "JSON of nested values, and tensors",
    "elastic/survivors.py": "JSON of the store: who goes on",
    "liveness/heartbeats/beat.py": "JSON of the store: a heartbeat",
    "liveness/store/mirror.py": "texts of the store, kept for those above",
    "liveness/heartbeats/probe.py": "sockets: one byte, compared with two",
    "liveness/heartbeats/ring.py": "texts of the store, for beat",
    "liveness/heartbeats/roll_call.py": "texts of the store, for attach/start",
    "liveness/heartbeats/status_record.py": "JSON of the store",
    "methods/push_sum/graphs.py": "digests, compared with others",
    "platform/addresses.py": "addresses in the store, handed to Gloo as they are",
    "platform/answering.py": "sockets: two bytes, compared with two others",
    "platform/process_group.py": "tensors of one element, not read",
    "replica/consensus.py": "JSON: names of buffers",
    "replica/switching/switched.py": "JSON: figures, and the method that is chosen by them",
    "replica/saving/checkpoint.py": "JSON: what the ranks have loaded",
    "replica/saving/per_rank.py": "JSON: names of files and faults",
    "replica/saving/registered.py": "JSON: states that ranks have saved",
    "replica/switching/agreement.py": "JSON: the method to switch to",
    "store/runs.py": "JSON of the store: signs of life",
    "transport/links.py": "a text of the store, for attach/start",
    "transport/run/membership.py": "JSON of the store: who takes part",
    "transport/messages.py": "tensors",
    "transport/run/rendezvous.py": "JSON of the store, after the token",
    "transport/requests.py": "tensors of one number",
    "transport/run/run_watch.py": "texts of the store: beats, compared with earlier ones",
    "transport/small_gathers.py": "structs of numbers and a word, and bytes for those above",
    "transport/run/token.py": "a text of the store, compared with another",
    "transport/world.py": "JSON of the store: names of hosts",
    "integrations/accelerate.py": "JSON: names of checkpoints",
    "integrations/replicas.py": "JSON of dtypes and shapes, and tensors of these in base64",
}
# Files and texts of the user, the kernel, and other processes of one machine.
LOCAL = {
    *("doctor/addresses.py", "hogwild/launch.py"),
    *("kernels/blocks.py", "lab/check/gloo_probe.py"),
    *("lab/check/path_probe.py", "lab/check/paths.py", "lab/network/delay_line.py"),
    *("lab/network/delaying.py", "liveness/interrupt.py", "plan/by_hand.py"),
    *("recipes/composed.py", "settings.py"),
    "telemetry/recording.py",
}  # fmt: skip


def names(tree: ast.AST) -> Iterator[str]:
    """The parts of all names that a file uses or imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (part for alias in node.names for part in alias.name.split("."))
            yield from (getattr(node, "module", None) or "").split(".")
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def files_with(wanted: set[str]) -> set[str]:
    return {
        str(path.relative_to(SOURCE)) for path, tree in TREES.items() if {*names(tree)} & wanted
    }


def test_nothing_received_is_unpickled() -> None:
    assert files_with(UNPICKLES) == UNPICKLING.keys()


def test_every_place_that_reads_bytes_of_peers_is_listed() -> None:
    assert not PEERS.keys() & LOCAL
    assert files_with(READS) == PEERS.keys() | LOCAL


def test_files_are_read_without_unpickling_objects() -> None:
    calls = [
        (path, node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load")
    ]
    assert len(calls) >= 2
    for path, call in calls:
        said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert said.get("weights_only") == "True", path
