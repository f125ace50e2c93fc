"""Graph passes: graph in, graph out. No communication happens here and no device is touched.

    recompute.py   joint graph: never save an unsharded parameter for backward
    uses.py        what does the graph read and produce?   graph -> facts
    schedule.py    what happens when?                       facts + groups + policy -> Schedule
    emit.py        write it down (unshard.py, reduce.py)    Schedule -> graph
    verify.py      is the written graph right?              graph + facts + Schedule -> or an error
    pipeline.py    the order of the above, and the two compilers it is plugged into

Only schedule.py decides anything. `str(schedule)` is a table, `show.show(graph)` prints the
communication of a rewritten graph.
"""
