"""Environments: programs that a policy acts in, turn by turn. `generate: environment:package.module:Class` runs one.

    environment.py   what a class has, and what it is given; of ours an environment imports nothing else
    observations.py  what an environment answers, checked
    episode.py       what a fork of the environment's process answers (nanodag.children)
    tool_calls.py    the calls of a message, as an environment gets them
    loop.py          the loop of a sample: the policy speaks, the environment answers

The object is made once, with the options of the config. Each sample has a fork of its process: an episode begins with
the object as it was made, and whatever it does to itself, to the machine's memory or to its own processes ends with it.
"""
