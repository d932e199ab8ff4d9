"""One rank's process. Light to import, so that it can choose its surroundings before torch is."""

import contextlib
import multiprocessing
import os
import threading
import traceback
from multiprocessing.connection import Connection

from parity.quiet import silence_import_notices


class RanksError(RuntimeError):
    """The ranks' processes cannot go on, or contradict each other; says which rank and why."""


def serve(connection: Connection, rank: int, ranks: int) -> None:
    """Answers each (method, arguments) by (True, result) or by (False, traceback) and the end.

    The method is one of `parity.ranks.RankReference`, or "open" with a scenario and a free port,
    which starts Megatron anew.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo on the CPU: a machine may have one GPU or none
    silence_import_notices()
    import torch

    import torch_ref
    from parity.ranks import RankReference

    torch.set_num_threads(1)
    reference = None
    with contextlib.ExitStack() as megatron, contextlib.suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            try:
                if method == "open":
                    scenario, port = arguments
                    os.environ["MASTER_PORT"] = str(port)
                    megatron.close()
                    size = scenario.ranks.tensor_parallel
                    megatron.enter_context(
                        torch_ref.start_megatron(tensor_model_parallel_size=size)
                    )
                    reference = RankReference(scenario)
                    answer = None
                else:
                    answer = getattr(reference, method)(*arguments)
            except Exception:
                connection.send((False, traceback.format_exc()))
                return
            connection.send((True, answer))


def _end_with_parent() -> None:
    """However the parent ends, nothing of it stays behind, not even in a collective."""
    multiprocessing.parent_process().join()
    os._exit(1)
