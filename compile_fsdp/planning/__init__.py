"""Plan training on a cluster that is not there: shapes only, no other rank, no memory for weights.

build     a model of fake tensors, on a mesh of a fake process group      (world, workload)
shard     fully_shard on its blocks and on the root                       (sharding)
capture   Dynamo and AOTAutograd; read the facts, compile nothing         (capture)
predict   the scheduler and the cost model on those facts                 (predict)
advise    predict again with other options; search: with other meshes     (advice, search)
"""
