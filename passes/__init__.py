"""Graph passes: graph in, graph out. No communication happens here and no device is touched.

uses.py        what does the graph read and produce?   graph -> facts
schedule.py    what happens when?                       facts + groups + policy -> Schedule
unshard.py     write gathers, waits and releases        Schedule -> graph
reduce.py      write reductions                         Schedule -> graph
verify.py      is the written graph right?              graph + facts + Schedule -> error or not
pipeline.py    the order of the above, and the two compilers it is plugged into
"""
