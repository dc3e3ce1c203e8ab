"""Agents: programs with their own loop and tools that ask the policy by OpenAI's API. No torch here.

Each sample has an address and a key. `api_server.py` is the server behind the address, one for all samples of a stage,
in the controller; `session.py` what one key opens: it keeps the ids that were sampled in each call, with
log-probabilities and versions, and makes sequences of them. `function.py` runs a Python function in a fork,
`command.py` any program in the sandbox.
"""
