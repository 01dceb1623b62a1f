"""What the ranks run in tests of the lab: small programs, most of them without torch."""

# Every phase is (senders, receiver, bytes). The receiver prints how long all of it took, from
# the moment that all senders are connected.
TRANSFER = """
import json, os, socket, sys, time
rank = int(os.environ["RANK"])
phases, nodes = json.loads(sys.argv[1]), json.loads(sys.argv[2])

def connect(port, host):
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            time.sleep(0.01)

listening = {
    i: socket.create_server(("", 7000 + i)) for i, (_, to, _) in enumerate(phases) if to == rank
}
for i, (senders, receiver, size) in enumerate(phases):
    if rank in senders:
        with connect(7000 + i, f"node{nodes[receiver]}") as wire:
            wire.recv(1)
            wire.sendall(bytes(size))
            wire.recv(1)
    elif rank == receiver:
        wires = [listening[i].accept()[0] for _ in senders]
        start = time.monotonic()
        for wire in wires:
            wire.send(b"g")
        for wire in wires:
            left = size
            while left:
                left -= len(wire.recv(min(left, 2**20)))
        print(i, time.monotonic() - start)
        for wire in wires:
            wire.close()
"""

# Both ranks print what governs a connection between their nodes.
CONGESTION = """
import os, socket, time
if os.environ["RANK"] == "0":
    wire = socket.create_server(("", 7000)).accept()[0]
else:
    while True:
        try:
            wire = socket.create_connection(("node0", 7000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
print(wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
"""

# Rank 0 sends a byte every 20 ms until rank 1, which prints the longest silence, has seen one.
SILENCE = """
import os, socket, time
if os.environ["RANK"] == "0":
    wire = socket.create_server(("", 7000)).accept()[0]
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setblocking(False)
    sent = 0
    while True:
        wire.send(bytes([sent % 256]))
        sent += 1
        time.sleep(0.02)
        try:
            wire.recv(1)
            break
        except BlockingIOError:
            pass
    wire.close()
else:
    last = start = time.monotonic()
    wire = None
    while wire is None:
        try:
            wire = socket.create_connection(("node0", 7000))
        except OSError:
            time.sleep(0.01)
    longest = received = after = 0
    while after < 20 and last - start < 40:
        for byte in wire.recv(4096):
            assert byte == received % 256
            received += 1
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        after += longest > 0.5
    print(longest)
"""

# How long 0.3 s of computing take.
COMPUTE = """
import time
start = time.monotonic()
while time.process_time() < 0.3:
    pass
print(time.monotonic() - start)
"""

# An ordinary script, as for torchrun.
PLAIN_DDP = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("parameters", [round(p.sum().item(), 5) for p in model.parameters()])
dist.destroy_process_group()
# A thread of torch (2.13) may still let go of a Python object, and aborts the process if the
# interpreter is at its end by then.
time.sleep(0.3)
"""

# Rank 0 is killed in the middle: the others must still find the store, and in it who is lost.
OFFBEAT = """
import os, signal
import torch
import torch.distributed as dist
import offbeat

dist.init_process_group("gloo")
world = offbeat.World.discover()
print("nodes", world.nodes)
model = torch.nn.Linear(4, 1)
replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
for step in range(4):
    if dist.get_rank() == 0 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(torch.randn(2, 4)).sum().backward()
        replica.step()
    except offbeat.PeerLost as error:
        print("lost", error)
        os._exit(0)
print("all four steps")
"""

# Trains until an error ends it; says which, and how many seconds after its last complete step.
LOST_LINK = """
import time
import torch
import offbeat
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
replica = offbeat.replicate(model, offbeat.ddp())
try:
    while True:
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
        if replica.steps == 1:
            print("trains", flush=True)
        time.sleep(0.02)
except offbeat.PeerLost as lost:
    print(lost, flush=True)
"""

# Trains a model whose parameters are easily recognized; the token of the run is in the environment.
# Rank 0 tells whether it reaches a port of node 1 outside of the tunnel.
ENCRYPTED = """
import os, socket
import torch
import offbeat
listening = socket.create_server(("", 7000))
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
world = offbeat.World.at(
    os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"], size=size, rank=rank
)
model = torch.nn.Linear(1000, 100)
torch.nn.init.constant_(model.weight, 1.2345)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
for _ in range(3):
    model(torch.randn(2, 1000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    replica.step()
replica.detach()
if rank == 0:
    outside = socket.socket()
    outside.settimeout(1)
    print("outside:", outside.connect_ex(("10.98.0.2", 7000)) == 0)
print("trained")
"""
