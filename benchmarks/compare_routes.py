"""Both compile routes on one workload, for scripts: the same as `vllm-neuron compare`, whose arguments it takes.

VLLM_NEURON_CPU_MODE=1 python benchmarks/compare_routes.py MODEL [FLAGS of vllm serve] --rounds 5 --json
"""

import sys

from vllm_neuron.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "compare")
    main()
