"""Show where one contender's step spends its time.

python benchmarks/profile_step.py grape
python benchmarks/profile_step.py dpsgd --workload resnet --steps 5 --by-shape
python benchmarks/profile_step.py grape --trace step.json      # for a trace viewer
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from contenders import CONTENDERS
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile a few steps after a few that do not count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--workload", choices=WORKLOADS, default="encoder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--by-shape", action="store_true", help="one row for each shape of the inputs")
    parser.add_argument("--by-memory", action="store_true", help="sort by the memory that an operation itself allocates")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    is_cuda = options.device.startswith("cuda")
    step = CONTENDERS[options.contender].start(WORKLOADS[options.workload].materials(options.device))
    for _ in range(options.warm_up):
        step()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
    with profile(activities=activities, record_shapes=options.by_shape, profile_memory=options.by_memory) as profiler:
        for _ in range(options.steps):
            step()
        if is_cuda:
            torch.cuda.synchronize()
    device = "cuda" if is_cuda else "cpu"
    order = f"self_{device}_memory_usage" if options.by_memory else f"self_{device}_time_total"
    averages = profiler.key_averages(group_by_input_shape=options.by_shape)
    print(averages.table(sort_by=order, row_limit=options.rows, max_name_column_width=45, max_shapes_column_width=70))
    if options.trace:
        profiler.export_chrome_trace(str(options.trace))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
