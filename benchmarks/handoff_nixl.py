"""NIXL's side of ``handoff.py``: WRITE from one process's memory into another's over UCX. Run by an interpreter that has ``nixl``.

``handoff_nixl.py BLOCK_NBYTES NUM_BLOCKS NUM_PARTS``: a block lies in ``NUM_PARTS`` pieces, one in each of as many equal
regions, as in a pool with a tensor for each layer's keys and values. Reads lines ``{"is_checked": bool}`` and answers each with
one line of figures. UCX takes its transports from the environment that ``handoff.py`` sets. A round is timed as for the others:
until the sender knows that the receiver has everything, which here is the transfer's own completion.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from nixl._api import nixl_agent, nixl_agent_config

POLL_S = 0.0001
ANSWER_S = 60.0


def pool_of(nbytes: int) -> tuple[mmap.mmap, int]:
    """Huge-page memory as the other ways use, and its address."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes(nbytes)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def agent_with(name: str, address: int, nbytes: int) -> Any:
    """An agent on UCX that has registered the pool."""
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(address, nbytes, 0, "")], mem_type="DRAM")
    return agent


def receive(nbytes: int, parent: Connection) -> None:
    """The receiving process: its memory is written; it only reports CPU time and a digest."""
    memory, address = pool_of(nbytes)
    agent = agent_with("receiver", address, nbytes)
    parent.send((agent.get_agent_metadata(), address))
    while (order := parent.recv()) is not None:
        if order == "clear":
            memory[:] = bytes(nbytes)
            parent.send(None)
        elif order == "cpu":
            parent.send(time.process_time())
        else:
            parent.send(hashlib.blake2b(memory).hexdigest())


def wait(agent: Any, handle: Any, state: str) -> None:
    """Until the transfer is done. Raises RuntimeError if it fails."""
    deadline_s = time.monotonic() + ANSWER_S
    while state != "DONE":
        if state == "ERR" or time.monotonic() > deadline_s:
            raise RuntimeError(f"the NIXL transfer is {state}")
        time.sleep(POLL_S)
        state = agent.check_xfer_state(handle)


def main() -> int:
    """The sending process, and the parent of the other."""
    block_nbytes, num_blocks, num_parts = (int(argument) for argument in sys.argv[1:])
    piece_nbytes, nbytes = block_nbytes // num_parts, block_nbytes * num_blocks
    context = multiprocessing.get_context("spawn")
    receiver, child_end = context.Pipe()
    process = context.Process(target=receive, args=(nbytes, child_end), daemon=True)
    process.start()
    memory, address = pool_of(nbytes)
    for index in range(num_blocks):
        memory[index * block_nbytes : index * block_nbytes + 8] = index.to_bytes(8, "little")
    agent = agent_with("sender", address, nbytes)
    metadata, remote_address = receiver.recv()
    peer = agent.add_remote_agent(metadata)

    def blocks(start: int) -> Any:
        pieces = [part * num_blocks + block for block in range(num_blocks) for part in range(num_parts)]
        places = [(start + piece * piece_nbytes, piece_nbytes, 0) for piece in pieces]
        return agent.get_xfer_descs(places, mem_type="DRAM")

    handle = agent.initialize_xfer("WRITE", blocks(address), blocks(remote_address), peer)

    def ask(order: str) -> Any:
        receiver.send(order)
        return receiver.recv()

    for line in sys.stdin:
        is_checked = json.loads(line)["is_checked"]
        if is_checked:
            ask("clear")
        receiver_cpu_s, sender_cpu_s, started_s = ask("cpu"), time.process_time(), time.perf_counter()
        wait(agent, handle, agent.transfer(handle))
        seconds = time.perf_counter() - started_s
        figures = {
            "seconds": seconds,
            "sender_cpu_s": time.process_time() - sender_cpu_s,
            "receiver_cpu_s": ask("cpu") - receiver_cpu_s,
        }
        if is_checked and ask("digest") != hashlib.blake2b(memory).hexdigest():
            raise RuntimeError("nixl: the receiver's pool does not hold what was sent")
        print(json.dumps(figures), flush=True)
    receiver.send(None)
    process.join(ANSWER_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
