"""A Ray cluster of three nodes of one core each on this machine, for as long as standard input is open.

It says its address; at each line that it reads it kills the youngest node, and says which that was. In a process of its
own, for Ray forks to start nodes, which a process may not in which JAX runs.
"""

import sys

from ray.cluster_utils import Cluster

NODE = dict(num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False)


def main():
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        for _ in range(2):
            cluster.add_node(**NODE)
        print("address", cluster.address, flush=True)
        for _ in sys.stdin:
            victim = cluster.list_all_nodes()[-1]
            cluster.remove_node(victim, allow_graceful=False)
            print("lost", victim.node_id, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
