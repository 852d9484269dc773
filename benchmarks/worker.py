"""One rank of one backend: `worker.py JOB RESULT`, with RANK, WORLD_SIZE, ... set as torchrun does.

JOB is `harness.job.Job` as JSON; the measurements are written to the file RESULT as JSON.
Started by `harness.launch`, not by hand.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from harness.job import Job
from harness.monitor import Monitor, StepMonitor
from harness.plain import PLAIN_BACKENDS


def _monitor(job: Job) -> Monitor:
    if job.task == "passes":
        from harness.pass_monitor import PassMonitor

        return PassMonitor(job)
    return StepMonitor(job)


def main() -> None:
    """Run the job; a hang ends with every thread's stack on stderr."""
    job = Job.from_json(sys.argv[1])
    faulthandler.dump_traceback_later(job.timeout_s * 0.9, exit=True)
    torch.set_num_threads(job.threads)
    if job.backend in PLAIN_BACKENDS:
        from harness.plain import run_plain as run
    else:
        from harness.trainer import run_lightning as run
    # Built after the imports, so that its base memory is that of a process with all code loaded.
    monitor = _monitor(job)
    run(job, monitor)
    Path(sys.argv[2]).write_text(json.dumps(monitor.result()))
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
