"""Child processes: started, spoken to, watched and ended, with all that they start. No torch here.

    child.py        a supervised child process
    fork_server.py  an interpreter that makes an object once and forks for each request
    forks.py        the asking end of that
    reaper.py       programs that leave no process behind
    tree.py         processes below one, their memory, and who inherits and ends them

`tree`, `reaper` and `fork_server` run in other packages' interpreters too: they need the standard library alone.
"""
